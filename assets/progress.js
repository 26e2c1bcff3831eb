// The sidebar says how much of each chapter has been read: a section is when its end has been on the screen. Only the reader's
// browser remembers it.
document.addEventListener("DOMContentLoaded", () => {
  const root = new URL(document.documentElement.dataset.content_root, location).href;
  const name = (link) => link.href.slice(root.length).replace(/\.html.*/, "");
  const read = remembered("read", {}); // of a chapter: the anchors of sections that have been read, and how many there are

  const show = () => {
    for (const link of document.querySelectorAll("nav.bd-docs-nav a")) {
      const { anchors, of } = read[name(link)] ?? {};
      if (!anchors?.length) continue;
      const mark = link.querySelector(".read") ?? document.createElement("span");
      mark.className = "read";
      mark.textContent = anchors.length === of ? "✓" : `${anchors.length}/${of}`;
      mark.setAttribute("role", "img");
      mark.setAttribute("aria-label", `${anchors.length} of ${of} sections read`);
      link.append(mark);
    }
  };

  const page = DOCUMENTATION_OPTIONS.pagename;
  const sections = [...document.querySelectorAll(".bd-article > section > section")];
  if (page.startsWith("chapters/") && sections.length) {
    const known = sections.map((section) => section.id); // a new edition of the book may have others
    const anchors = (read[page]?.anchors ?? []).filter((anchor) => known.includes(anchor));
    read[page] = { anchors, of: sections.length };
    const ends = new IntersectionObserver(
      (entries) => {
        for (const { isIntersecting, target } of entries) {
          const { id } = sections.find((section) => section.contains(target));
          if (isIntersecting && !anchors.includes(id)) anchors.push(id);
        }
        remember("read", { ...remembered("read", {}), [page]: read[page] }); // another tab may have written, too
        show();
      },
      { rootMargin: "-25% 0px 0px 0px" }, // not the end of the section before one that a link leads to
    );
    for (const section of sections) ends.observe(section.lastElementChild);
  }
  show();
});
