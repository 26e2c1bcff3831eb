// From a folder on disk a page may not fetch another one, so the search page lists its hits without an excerpt there.
if (location.protocol === "file:") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;

// Sphinx wrote each formula's TeX into an element of class "math"; a displayed one may hold its number as well.
document.addEventListener("DOMContentLoaded", () => {
  if (!window.katex) return; // a page without formulas
  for (const element of document.querySelectorAll("span.math, div.math")) {
    const displayMode = element.tagName === "DIV";
    const tex = [...element.childNodes].filter((node) => node.nodeType === Node.TEXT_NODE);
    const formula = document.createElement("span");
    katex.render(tex.map((node) => node.data).join(""), formula, { displayMode, throwOnError: false });
    tex.forEach((node) => node.remove());
    element.append(formula);
  }
});

// The theme names what opens a hidden cell, and its search button, by other words than those that stand there.
document.addEventListener("DOMContentLoaded", () => {
  for (const element of document.querySelectorAll("details > summary[aria-label], .search-button-field[aria-label]"))
    element.removeAttribute("aria-label");
});
