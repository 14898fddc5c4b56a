// What a card can train, and configs to begin with: those of the table, and the packaged examples.
import { maySwitch, newConfig, openConfig } from "./app.js";
import { api, page, sentences } from "./common.js";

const table = page("#card-table");
const name = page("#card-name");
const told = page("#cards-told");
let asked = 0;

page("#card-form").addEventListener("submit", (event) => {
  event.preventDefault();
  show();
});

// Computes and shows the table of the card that is typed; a newer question makes an older one void.
async function show() {
  asked += 1;
  const question = asked;
  told.className = "dim";
  told.textContent = "Calculating; this takes some seconds.";
  table.setAttribute("aria-busy", "true");
  const answer = await fetch(`/cards?card=${encodeURIComponent(name.value.trim())}`).catch(() => null);
  const text = answer ? await answer.text() : "";
  if (question !== asked) return;
  table.removeAttribute("aria-busy");
  told.className = answer?.ok ? "dim" : "bad";
  told.textContent = answer?.ok ? "" : reason(text);
  table.innerHTML = answer?.ok ? text : "";
}

function reason(text) {
  if (!text) return "The server does not answer.";
  return sentences({ ok: false, data: JSON.parse(text) }).join(" ");
}

// Writes a config for a row of the table, and opens it.
table.addEventListener("click", async ({ target }) => {
  const button = target.closest("button[data-model]");
  if (!button || !(await maySwitch())) return;
  const { model, kind, size } = button.dataset;
  const written = await api("/api/cards/begin", { method: "POST", body: { model, kind, size } });
  if (!written.ok) {
    told.className = "bad";
    told.textContent = sentences(written).join(" ");
    return;
  }
  await openConfig(written.data.config);
  location.hash = "dataset"; // what is missing: the folder of files
});

for (const button of document.querySelectorAll("[data-example]")) {
  button.addEventListener("click", () => newConfig(`examples/${button.dataset.example}`));
}
