// Searches the documentation while one types, and copies blocks of code. The page may not send forms, so it fetches what
// they would show.
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

// ---- Blocks of code ----

async function copy(block, button) {
  try {
    await navigator.clipboard.writeText(block.textContent);
    button.textContent = "Copied";
  } catch {
    // Without https, a browser does not let a page write to the clipboard.
    getSelection().selectAllChildren(block);
    button.textContent = "Selected: press Ctrl+C";
  }
}

for (const block of content.querySelectorAll("pre")) {
  const frame = document.createElement("div");
  const button = document.createElement("button");
  frame.className = "snippet";
  Object.assign(button, { type: "button", className: "copy", textContent: "Copy" });
  button.addEventListener("click", () => copy(block, button));
  block.replaceWith(frame);
  frame.append(block, button);
}

// ---- Search ----

form.addEventListener("input", () => {
  clearTimeout(timer);
  timer = setTimeout(show, 150);
});
form.addEventListener("submit", (event) => {
  event.preventDefault();
  clearTimeout(timer);
  show();
});
