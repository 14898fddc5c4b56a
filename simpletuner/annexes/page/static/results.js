// The output of a run: any two steps side by side, pages of previews, curves overlaid with another run's; and the jobs of
// the queue.
/* global fillComparison, itemOf */

import { element } from "./common.js";
import { parsed, parts, run, send, want } from "./run.js";

const pane = document.querySelector(".run-view");
const comparison = document.getElementById("comparison");
const beside = document.getElementById("beside");
const [before, after] = comparison.querySelectorAll("select");

// Replaces the options of a select, keeping the selection.
function offer(select, entries, otherwise) {
  const known = entries.some(([value]) => value === select.value) ? select.value : otherwise;
  select.replaceChildren(...entries.map(([value, text]) => element("option", { value }, text)));
  select.value = known;
}

// ---- Any two steps ----

let compared = ""; // run, steps and number of previews of the comparison shown

async function compare() {
  const text = document.getElementById("steps")?.textContent ?? "[]";
  const steps = JSON.parse(text).map(String);
  comparison.hidden = steps.length < 2;
  if (comparison.hidden) return;
  const isNew = !compared.startsWith(`${run} `);
  const newest = !isNew && before.value !== "" && after.value === after.lastElementChild?.value;
  offer(before, steps.map((step) => [step, step]), steps[0]);
  offer(after, steps.map((step) => [step, step]), steps.at(-1));
  if (isNew) before.value = steps[0];
  if (isNew || newest) after.value = steps.at(-1);
  const count = pane.querySelectorAll(`[data-part=previews] [data-step="${after.value}"]`).length; // previews of a round arrive one by one
  const wanted = `${run} ${before.value} ${after.value} ${text} ${count}`;
  if (wanted === compared) return;
  compared = wanted;
  const answer = await fetch(`/runs/${encodeURIComponent(run)}/pair?before=${before.value}&after=${after.value}`).catch(() => null);
  if (wanted !== compared) return;
  if (!answer?.ok) return void (compared = ""); // retried at the next update
  const rows = [...parsed(await answer.text()).querySelectorAll(".prompt-row")].map((row, group) =>
    [...row.querySelectorAll("button.preview")].map((button) =>
      itemOf(button, group, row.dataset.name, row.querySelector(".prompt").textContent)));
  fillComparison(comparison, rows);
}

comparison.addEventListener("change", (event) => {
  if (event.target.matches("select")) compare();
});
pane.addEventListener("shown", compare);

// ---- Pages of previews, and curves of another run ----

const observer = new MutationObserver(() => {
  const others = [...pane.querySelectorAll("[data-part=list] a[data-run]")].filter((link) => link.dataset.run !== run);
  offer(beside.querySelector("select"), [["", "no other run"], ...others.map((link) => [link.dataset.run, link.firstChild.textContent])], "");
  beside.hidden = !others.length || !pane.querySelector("[data-part=curves] figure");
});
observer.observe(pane.querySelector("[data-part=list]"), { childList: true, subtree: true, attributes: true });
observer.observe(pane.querySelector("[data-part=curves]"), { childList: true });

pane.addEventListener("change", (event) => {
  const { choice } = event.target.dataset;
  if (!choice) return;
  const part = choice === "page" ? "previews" : "curves";
  parts[part].query = event.target.value && new URLSearchParams({ [choice]: event.target.value }).toString();
  want(part);
});

// ---- Jobs ----

pane.addEventListener("click", (event) => {
  const job = event.target.closest("[data-job]")?.dataset.job;
  if (event.target.matches("[data-move]")) send("queue/move", { job, by: Number(event.target.dataset.move) });
  if (event.target.matches("[data-again]")) send("queue/again", { job });
  if (event.target.matches("[data-remove]")) send("queue/remove", { job });
});
