// The answer below a Predict box is covered until the reader asks for it, or scrolls on until it is in the upper quarter of the
// window. A check box on the page switches that off, which the browser remembers. Print and pages without scripts show all.
document.addEventListener("DOMContentLoaded", () => {
  const boxes = [...document.querySelectorAll(".bd-article .admonition.tip")]; // plain_markdown.py
  if (!boxes.length) return;

  // What cells below the box put out, and the first text after that; where a text comes first, that, too. A figure to play with
  // isn't covered, nor are words that end in a colon and lead to the answer.
  const answer = (box) => {
    const parts = [];
    for (let next = box.nextElementSibling; next && !next.matches("section, .admonition, details"); next = next.nextElementSibling) {
      const part = next.matches(".cell") ? next.querySelector(":scope > .cell_output:not(:has([data-mgpu]))") : next;
      if (!part || (!parts.length && /:\s*$/.test(next.textContent))) continue;
      parts.push(part);
      const leads = parts.length === 1 && next.nextElementSibling?.matches(".cell");
      if (part === next && !part.matches("figure") && !leads) break;
    }
    return parts;
  };

  const covers = new Map(); // of a box: its answer, and the button that is in front of it
  const open = (box) => {
    const { parts, button } = covers.get(box);
    covers.delete(box);
    scroll.unobserve(parts[0]);
    button.remove();
    for (const part of parts) {
      part.classList.remove("covered");
      part.inert = false;
    }
    return parts[0];
  };
  const cover = (box) => {
    const parts = answer(box);
    if (!parts.length) return;
    const button = document.createElement("button");
    button.className = "open-answer d-print-none";
    button.textContent = "Show the answer";
    button.addEventListener("click", () => {
      const first = open(box);
      first.tabIndex = -1;
      first.focus({ preventScroll: true });
    });
    for (const part of parts) {
      part.classList.add("covered");
      part.inert = true;
    }
    parts[0].before(button);
    covers.set(box, { parts, button });
    scroll.observe(parts[0]);
  };
  const openWhere = (holds) => {
    for (const [box, { parts }] of covers) if (parts.some(holds)) open(box);
  };

  const reached = (entries) => {
    const parts = new Set(entries.filter((entry) => entry.isIntersecting).map((entry) => entry.target));
    openWhere((part) => parts.has(part));
  };
  const scroll = new IntersectionObserver(reached, { rootMargin: "100000px 0px -75% 0px" });

  // A link into an answer opens it, and a hit of the search those of its section.
  const arrive = () => {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    const found = new URLSearchParams(location.search).has("find");
    if (target) openWhere((part) => part.contains(target) || (found && target.contains(part)));
  };
  addEventListener("hashchange", arrive);

  const choice = document.createElement("label");
  choice.className = "cover-answers d-print-none";
  choice.innerHTML = '<input type="checkbox"> Cover answers until I ask for them or scroll on';
  const [check] = choice.children;
  check.checked = !remembered("answers", false);
  check.addEventListener("change", () => {
    remember("answers", !check.checked);
    if (check.checked) boxes.forEach(cover);
    else [...covers.keys()].forEach(open);
  });
  boxes[0].append(choice);
  if (check.checked) boxes.forEach(cover);
  arrive();
});
