// The result of a run: the panel that gives the file of some weights, stars, and comparisons of checkpoints.
/* global moreTools */

import { api, element, say, sentences } from "./common.js";
import { forms, parsed, run, send, want } from "./run.js";

const pane = document.querySelector(".run-view");

// ---- "Use this" ----

const panel = element("dialog", { id: "use" });
panel.setAttribute("aria-labelledby", "use-title");
document.body.append(panel);

let latest = 0; // number of the last panel that was asked for
let shownQuery = null; // the weights in the panel

async function openPanel(query) {
  const mine = (latest += 1);
  const asked = run;
  const answer = await fetch(`/runs/${encodeURIComponent(run)}/use?${query}`).catch(() => null);
  const html = answer?.ok ? await answer.text() : await refusalOf(answer);
  if (mine !== latest || asked !== run) return; // other weights, or another run, were chosen meanwhile
  panel.replaceChildren(...parsed(html).childNodes);
  shownQuery = query;
  if (!panel.open) panel.showModal();
}

async function refusalOf(answer) {
  const data = await answer?.json().catch(() => null);
  const told = sentences({ data }).join(" ") || "The server does not answer.";
  const close = '<form method="dialog"><button type="submit">${say("Close")}</button></form>';
  return `<h2 id="use-title">${say("Not available")}</h2>${element("p", { textContent: told }).outerHTML}${close}`;
}

function use({ use: step, strength, ema }) {
  const query = new URLSearchParams({ step, strength });
  if (ema !== undefined) query.set("ema", "1");
  openPanel(query);
}

panel.addEventListener("change", (event) => {
  if (!event.target.matches("[data-built-in]")) return;
  shownQuery.set("built_in", event.target.checked ? "1" : "0");
  openPanel(shownQuery);
});
panel.addEventListener("click", (event) => {
  if (event.target === panel) panel.close();
  copy(event);
});

// ---- Copying ----

function copy(event) {
  if (!event.target.matches(".snippet .copy")) return;
  getSelection().selectAllChildren(event.target.nextElementSibling);
  event.target.textContent = document.execCommand("copy") ? say("Copied") : say("Press Ctrl-C");
}

// ---- Stars ----

async function star(button) {
  const { star: step, strength, prompt, ema } = button.dataset;
  const starred = button.getAttribute("aria-pressed") !== "true";
  show(button, starred);
  const body = { run, step: Number(step), strength: Number(strength), prompt, ema: ema !== undefined, starred };
  if (!(await send("star", body))) show(button, !starred);
  want("results");
}

function show(button, starred) {
  button.setAttribute("aria-pressed", String(starred));
  if (button.textContent.length === 1) button.textContent = starred ? "★" : "☆";
}

// ---- Size of the cells ----

const NARROWEST = 112; // pixels
const WIDEST = 240;
const PADDING = 13; // of a cell, and its border

// The width with which all columns fit into the table's box, within limits.
function fittingWidth(box) {
  const heads = [...box.querySelectorAll("thead th")];
  const columns = heads.filter((head) => !head.className || head.className === "best");
  const labels = heads.filter((head) => !columns.includes(head));
  const taken = labels.reduce((sum, head) => sum + head.offsetWidth, 0);
  const width = (box.parentElement.clientWidth - taken - 4) / columns.length - PADDING;
  return Math.max(NARROWEST, Math.min(WIDEST, Math.floor(width)));
}

function setSize(size) {
  pane.dataset.cells = size;
  const box = pane.querySelector(".table-box");
  if (box && size === "M") box.style.setProperty("--cell", `${fittingWidth(box)}px`);
  else box?.style.removeProperty("--cell");
  for (const button of pane.querySelectorAll("[data-cell-size]")) {
    button.setAttribute("aria-pressed", String(button.dataset.cellSize === size));
  }
}

const rememberedSize = () => localStorage.getItem("cell-size") ?? (innerWidth > 700 ? "M" : "S");
setSize(rememberedSize());
pane.addEventListener("shown", () => setSize(rememberedSize()));
addEventListener("resize", () => setSize(rememberedSize()));

function changeSize(size) {
  localStorage.setItem("cell-size", size);
  setSize(size);
}

// ---- Comparisons ----

function asked(form) {
  const { prompts = "", prompt, ...fields } = Object.fromEntries(new FormData(form));
  const ticked = [...form.querySelectorAll("[name=prompt]")];
  const chosen = ticked.filter((box) => box.checked).map((box) => box.value);
  const written = prompts.split("\n").filter((line) => line.trim());
  // Without prompts, the command takes those of the run, with the pictures that belong to them.
  const isWhole = chosen.length === ticked.length && !written.length;
  return { ...fields, prompts: isWhole ? [] : [...chosen, ...written] };
}

forms.job = async (form) => {
  await send("render", { run, command: form.dataset.job, ...asked(form) });
  want("results");
};

let pause = 0;

function estimate(form) {
  clearTimeout(pause);
  pause = setTimeout(async () => {
    const mine = pause;
    const answer = await api("/api/training/estimate", { method: "POST", body: { run, ...asked(form) } });
    if (answer.ok && mine === pause) form.querySelector("[data-estimate]").textContent = answer.data.estimate;
  }, 300);
}

pane.addEventListener("input", (event) => {
  const form = event.target.closest("form[data-job=sweep]");
  if (form) estimate(form);
});

pane.addEventListener("click", (event) => {
  copy(event);
  const button = event.target.closest("button");
  if (button?.dataset.use) use(button.dataset);
  else if (button?.dataset.star) star(button);
  else if (button?.dataset.cellSize) changeSize(button.dataset.cellSize);
  else if (button?.dataset.cancel) send("queue/remove", { job: button.dataset.cancel }).then(() => want("results"));
});

// ---- In the viewer ----

// A star or "Use this" of a cell, for the viewer: the control of the table does the work.
function twinOf(control) {
  const twin = control.cloneNode(true);
  twin.addEventListener("click", () => {
    if (twin.dataset.use) {
      use(twin.dataset);
      return;
    }
    star(control);
    show(twin, control.getAttribute("aria-pressed") === "true");
  });
  return twin;
}

moreTools.push(({ button }) => {
  const choice = button.closest("td")?.querySelector(".choice");
  return choice ? [...choice.children].map(twinOf) : [];
});
