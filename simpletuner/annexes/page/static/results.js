// The output of a run: curves overlaid with another run's; and the jobs of the queue.

import { element } from "./common.js";
import { parts, run, send, want } from "./run.js";

const pane = document.querySelector(".run-view");

// Replaces the options of a select, keeping the selection.
function offer(select, entries, otherwise) {
  const known = entries.some(([value]) => value === select.value) ? select.value : otherwise;
  select.replaceChildren(...entries.map(([value, text]) => element("option", { value }, text)));
  select.value = known;
}

// ---- Curves of another run ----

function offerOthers() {
  const beside = document.getElementById("beside");
  if (!beside) return;
  const others = [...pane.querySelectorAll("[data-part=list] a[data-run]")].filter((link) => link.dataset.run !== run);
  offer(beside.querySelector("select"), [["", "no other run"], ...others.map((link) => [link.dataset.run, link.querySelector("b").textContent])], "");
  beside.hidden = !others.length;
}
const observer = new MutationObserver(offerOthers);
observer.observe(pane.querySelector("[data-part=list]"), { childList: true, subtree: true, attributes: true });
observer.observe(pane.querySelector("[data-part=curves]"), { childList: true });

pane.addEventListener("change", ({ target }) => {
  if (!target.closest("#beside")) return;
  parts.curves.query = target.value && new URLSearchParams({ beside: target.value }).toString();
  want("curves");
});

// ---- Jobs ----

pane.addEventListener("click", (event) => {
  const job = event.target.closest("[data-job]")?.dataset.job;
  if (event.target.matches("[data-move]")) send("queue/move", { job, by: Number(event.target.dataset.move) });
  if (event.target.matches("[data-again]")) send("queue/again", { job });
  if (event.target.matches("[data-remove]")) send("queue/remove", { job });
});
