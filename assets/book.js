// What the browser remembers of a reader, where it may.
const remembered = (name, otherwise) => {
  try {
    return JSON.parse(localStorage.getItem(`mgpu-${name}`)) ?? otherwise;
  } catch {
    return otherwise;
  }
};
const remember = (name, value) => {
  try {
    localStorage.setItem(`mgpu-${name}`, JSON.stringify(value));
  } catch {
    // a private window, or no room: the page works, and forgets
  }
};

// Words of a search: marked where a text has them, in the singular or plural, and not as a part of another word.
const wordPattern = (words) => new RegExp(`(?<![a-z0-9])(?:${words.join("|") || "(?!)"})s?(?![a-z0-9])`, "gi");
function markWords(root, words, except = "script, style") {
  const take = (node) =>
    node.nodeType === Node.TEXT_NODE
      ? NodeFilter.FILTER_ACCEPT
      : node.matches(except)
        ? NodeFilter.FILTER_REJECT
        : NodeFilter.FILTER_SKIP;
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_ELEMENT | NodeFilter.SHOW_TEXT, take);
  const ranges = [];
  while (walker.nextNode())
    for (const match of walker.currentNode.data.matchAll(wordPattern(words))) {
      const range = new Range();
      range.setStart(walker.currentNode, match.index);
      range.setEnd(walker.currentNode, match.index + match[0].length);
      ranges.push(range);
    }
  globalThis.CSS?.highlights?.set("found", new Highlight(...ranges)); // browsers of 2023 and later
}

// A hit of the search leads to page.html?find=two+words#section: there the words are marked, until Escape is pressed.
document.addEventListener("DOMContentLoaded", () => {
  const words = new URLSearchParams(location.search).get("find")?.match(/[a-z0-9]+|[\u4e00-\u9fff]+/g);
  const target = words && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!target) return;
  markWords(target.matches("section, .admonition") ? target : target.parentElement, words, "section, script, style, .katex");
  addEventListener("keydown", ({ key }) => key === "Escape" && CSS.highlights?.delete("found"));
});

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

// Paper is white: a dark page is printed in its light colors.
addEventListener("beforeprint", () => {
  const { theme } = document.documentElement.dataset;
  document.documentElement.dataset.theme = "light";
  addEventListener("afterprint", () => (document.documentElement.dataset.theme = theme), { once: true });
});
