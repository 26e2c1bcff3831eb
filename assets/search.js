// The search page: MiniSearch makes an index of all sections (sections.js), and each hit leads to one.
{
  const NOT_SOUGHT = new Set(
    ("a an and are as at be but by can do does for from has have how i in is it its my not of on or should that the this to " +
      "was what when which why will with you your").split(" "),
  );
  const HITS = 20;
  const EXCERPT = 220; // characters

  // What a text is found by: its words, in the singular, and NamesLikeThis in parts, too; of Chinese, which has no spaces, each
  // two characters; and each two of all these that follow each other, so that phrases count.
  const searchTerms = (text) => {
    const all = [];
    const sought = [];
    for (const run of text.normalize("NFKC").match(/[a-z0-9]+|[\u4e00-\u9fff]+/gi) ?? []) {
      const chinese = run.length > 1 && run > "\u4e00";
      const parts = chinese ? [...run].slice(1).map((_, i) => run.slice(i, i + 2)) : run.split(/(?<=[a-z])(?=[A-Z])/);
      for (const word of new Set([...(chinese ? [] : [run]), ...parts].map((part) => part.toLowerCase()))) {
        all.push(word.replace(/(?<=[a-z]{2}[^s])s$/, ""));
        if (/..|\d/.test(word) && !NOT_SOUGHT.has(word)) sought.push(all.at(-1));
      }
    }
    return [...sought, ...all.slice(1).map((term, i) => `${all[i]} ${term}`)];
  };
  const isWord = (term) => !term.includes(" ");

  const sections = window.bookPages
    .flatMap(({ page, title, sections }) => sections.map((section) => [page, title, ...section]))
    .map(([page, chapter, anchor, title, text], id) => ({ id, page, chapter, anchor, title, text }));
  const index = new MiniSearch({
    fields: ["title", "chapter", "text"],
    tokenize: searchTerms,
    processTerm: (term) => term,
    searchOptions: {
      boost: { title: 3, chapter: 0.5 },
      prefix: (term) => isWord(term) && term.length > 2,
      fuzzy: (term) => isWord(term) && term.length > 4 && 0.2, // the share of letters that may be wrong
      weights: { prefix: 0.4, fuzzy: 0.4 },
      boostDocument: (id) => (sections[id].page === "references.html" ? 0.3 : 1), // titles of others' texts
    },
  });
  index.addAll(sections);

  // What stands in quotes must stand in the section, whatever lies between the words. A message has quotes, too: where no section
  // has all that stands in them, they count like other words.
  const spaced = (text) => ` ${(text.normalize("NFKC").toLowerCase().match(/[a-z0-9\u4e00-\u9fff]+/g) ?? []).join(" ")} `;
  const search = (query) => {
    const phrases = [...query.matchAll(/["“”]([^"“”]+)["“”]/g)].map((match) => spaced(match[1]));
    const whole = ({ title, text }) => spaced(`${title} ${text}`);
    const hits = index.search(query);
    const exact = hits.filter(({ id }) => phrases.every((phrase) => whole(sections[id]).includes(phrase)));
    return exact.length ? exact : hits;
  };

  // The part of a text that holds most of the words.
  const excerpt = (text, words) => {
    const places = [...text.matchAll(wordPattern(words))].map((match) => [match.index, match[0].toLowerCase()]);
    const different = (start) =>
      new Set(places.filter(([place]) => place >= start && place < start + EXCERPT).map(([, word]) => word)).size;
    const [best] = places.reduce((best, next) => (different(next[0]) > different(best[0]) ? next : best), places[0] ?? [0]);
    const start = best < EXCERPT / 2 ? 0 : text.lastIndexOf(" ", best - 20) + 1;
    const end = start + EXCERPT < text.length ? text.lastIndexOf(" ", start + EXCERPT) : text.length;
    return `${start ? "… " : ""}${text.slice(start, end)}${end < text.length ? " …" : ""}`;
  };

  const item = (hit) => {
    const { page, chapter, anchor, title, text } = sections[hit.id];
    const words = hit.terms.filter(isWord);
    const element = document.createElement("li");
    element.innerHTML = "<a></a><span></span><p></p>";
    const [link, where, part] = element.children;
    link.href = `${page}?find=${encodeURIComponent(words.join(" "))}#${anchor}`;
    link.textContent = title;
    where.textContent = title === chapter ? "" : chapter;
    part.textContent = excerpt(text, words);
    return element;
  };

  const field = document.getElementById("search-words");
  const count = document.getElementById("search-count");
  const list = document.getElementById("search-hits");
  const show = () => {
    const query = field.value.trim();
    const hits = query ? search(query) : [];
    const sectionsFound = `${hits.length} ${hits.length === 1 ? "section" : "sections"}`;
    count.textContent = !query ? "" : hits.length > HITS ? `${sectionsFound}, the first ${HITS} of them:` : `${sectionsFound}:`;
    if (query && !hits.length) count.textContent = "No section has such words.";
    list.replaceChildren(...hits.slice(0, HITS).map(item));
    markWords(list, [...new Set(hits.slice(0, HITS).flatMap((hit) => hit.terms.filter(isWord)))]);
    history.replaceState(null, "", query ? `?q=${encodeURIComponent(query)}` : "?"); // so that Back shows the hits again
  };

  field.addEventListener("input", show);
  field.form.addEventListener("submit", (event) => {
    event.preventDefault();
    list.querySelector("a")?.focus();
  });
  field.value = new URLSearchParams(location.search).get("q") ?? "";
  show();
  field.focus();
}
