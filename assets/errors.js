// The search box of the page of error messages: it finds a pasted message though its numbers, paths and names are others.
document.addEventListener("DOMContentLoaded", () => {
  const page = document.querySelector("#error-messages");
  if (!page) return;

  // Pairs of neighboring words, without numbers, paths, addresses and a rank's prefix.
  const pairs = (text) => {
    const plain = text.toLowerCase().replace(/\[rank\d+\]:?|\S*[/\\]\S*|0x[0-9a-f]+|\d+/g, " ");
    const words = plain.match(/[a-z_]+/g) ?? [];
    return new Set(words.slice(1).map((word, i) => `${words[i]} ${word}`));
  };
  const entries = [...page.querySelectorAll(":scope > section > section")].map((section) => {
    const title = section.querySelector("h3").textContent.replace(/#$/, "");
    const message = section.querySelector(".highlight-text pre").textContent;
    return { id: section.id, title, pairs: pairs(`${title}\n${message}`) };
  });
  const count = new Map();
  for (const entry of entries) for (const pair of entry.pairs) count.set(pair, (count.get(pair) ?? 0) + 1);
  const weight = (set) => [...set].reduce((sum, pair) => sum + 1 / (count.get(pair) ?? 1), 0);

  // How much of the shorter of both, the message here and the text, is in the other; rare pairs of words say more.
  const found = (text) => {
    const given = pairs(text);
    return entries
      .map((entry) => {
        const shared = weight([...entry.pairs].filter((pair) => given.has(pair)));
        return { ...entry, shared, part: shared / weight(entry.pairs), partGiven: shared / weight(given) };
      })
      .filter(({ shared, part, partGiven }) => shared >= 1 && Math.max(part, partGiven) > 0.3)
      .sort((a, b) => Math.max(b.part, b.partGiven) - Math.max(a.part, a.partGiven) || b.part - a.part)
      .slice(0, 3);
  };

  const form = document.createElement("div");
  form.className = "find-error";
  form.innerHTML =
    '<label for="pasted">Paste your message</label><textarea id="pasted" rows="3" spellcheck="false"></textarea>' +
    '<ol aria-live="polite"></ol>';
  page.querySelector("h1").after(form);
  const [, field, list] = form.children;
  field.addEventListener("input", () => {
    const hits = found(field.value).map((entry) => {
      const link = document.createElement("a");
      link.href = `#${entry.id}`;
      link.textContent = entry.title;
      const item = document.createElement("li");
      item.append(link);
      return item;
    });
    const none = document.createElement("li");
    none.textContent = "No message on this page is like it.";
    list.replaceChildren(...(hits.length || !field.value.trim() ? hits : [none]));
  });
});
