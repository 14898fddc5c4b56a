// Searches the documentation while one types. The page may not send forms, so it fetches what they would show.
const form = document.querySelector("[role=search]");
const content = document.querySelector("#content");
let latest = 0;
let timer;

async function show() {
  const query = form.q.value.trim();
  const address = query ? `/docs/?q=${encodeURIComponent(query)}` : "/docs/";
  const number = ++latest;
  const answer = await fetch(address);
  const shown = new DOMParser().parseFromString(await answer.text(), "text/html");
  if (number !== latest) return; // a later search is under way
  history.replaceState(null, "", address); // first, since links are relative to it
  content.replaceChildren(...shown.querySelector("#content").childNodes);
}

form.addEventListener("input", () => {
  clearTimeout(timer);
  timer = setTimeout(show, 150);
});
form.addEventListener("submit", (event) => {
  event.preventDefault();
  clearTimeout(timer);
  show();
});
