// The list of preview prompts of a config, in a dialog over the page. The server draws it (prompts.html.jinja); here it
// is edited and saved as a whole.
import { api, element, sentences } from "./common.js";

const KEYS = ["name", "prompt", "seed", "resolution", "guidance", "picture"];
let config = ""; // whose prompts are shown
let kept = ""; // the list as it was opened or saved
let wasSaved = false;

const dialog = element("dialog", { id: "prompts" });
dialog.setAttribute("aria-labelledby", "prompts-title");
document.head.append(element("link", { rel: "stylesheet", href: "/static/prompts.css" }));
document.body.append(dialog);
addEventListener("beforeunload", (event) => dialog.open && isDirty() && event.preventDefault());

const find = (selector) => dialog.querySelector(selector);
const rows = () => [...dialog.querySelectorAll("form .prompt-item")];
const control = (row, key) => row.querySelector(`[name=${key}]`);

// ---- Opening ----

export async function show(name) {
  config = name;
  wasSaved = false;
  await load();
  if (!dialog.open) dialog.showModal();
}

async function load() {
  const asked = config;
  const response = await fetch(`/prompts?config=${encodeURIComponent(config)}`).catch(() => null);
  const html = response?.ok ? await response.text() : "";
  if (asked !== config) return; // those of another config were asked for meanwhile
  if (!html) return showRefusal(response);
  dialog.innerHTML = html;
  kept = written();
  showState();
}

async function showRefusal(response) {
  const title = element("h2", { id: "prompts-title", textContent: `Preview prompts of ${config}` });
  const close = element("button", { type: "button", value: "close", textContent: "Close" });
  const data = await response?.json().catch(() => null);
  const reason = data ? sentences({ ok: false, data }).join(" ") : "The server does not answer.";
  dialog.replaceChildren(element("header", {}, title, close), element("p", { className: "bad", textContent: reason }));
  kept = written();
}

// ---- The list ----

function listed() {
  return rows().map((row) => {
    const texts = KEYS.map((key) => [key, control(row, key)?.value ?? row.dataset[key] ?? ""]);
    return { was: row.dataset.was, ...Object.fromEntries(texts) };
  });
}

const written = () => JSON.stringify(listed());
const isDirty = () => written() !== kept;

function showState() {
  const save = find("[value=save]");
  if (!save) return;
  save.disabled = !isDirty();
  find(".none").hidden = rows().length > 0;
  for (const [index, row] of rows().entries()) {
    row.querySelector("[value=up]").disabled = index === 0;
    row.querySelector("[value=down]").disabled = index === rows().length - 1;
  }
}

function tell(...parts) {
  find(".said").replaceChildren(...parts);
}

function add() {
  const row = find("template").content.firstElementChild.cloneNode(true);
  find(".prompt-items").append(row);
  control(row, "prompt").focus();
}

function copy(row) {
  const twin = row.cloneNode(true);
  // Typed texts are not part of the HTML that is copied.
  for (const key of KEYS) {
    if (control(row, key)) control(twin, key).value = control(row, key).value;
  }
  control(twin, "name").value = freeName(control(row, "name").value);
  row.after(twin);
  control(twin, "prompt").focus();
}

function freeName(name) {
  if (!name) return ""; // it will be named after its words
  const taken = rows().map((row) => control(row, "name").value.toLowerCase());
  const stem = name.replace(/_\d+$/, "");
  let number = 2;
  while (taken.includes(`${stem}_${number}`.toLowerCase())) number += 1;
  return `${stem}_${number}`;
}

function move(row, button) {
  if (button.value === "up") row.previousElementSibling.before(row);
  else row.nextElementSibling.after(row);
  showState();
  const other = row.querySelector("[value=up]:enabled, [value=down]:enabled");
  (button.disabled ? other : button)?.focus();
  row.scrollIntoView({ block: "nearest" });
}

function remove(row) {
  const next = row.nextElementSibling ?? row.previousElementSibling;
  row.remove();
  (next?.querySelector("[value=remove]") ?? find("[value=add]")).focus();
}

// ---- Saving ----

// `etag`: of the file that is replaced; empty for a new one.
async function save(etag = find("form").dataset.etag) {
  const path = `/api/prompts?config=${encodeURIComponent(config)}`;
  find("[value=save]").disabled = true;
  const answer = await api(path, { method: "PUT", etag: etag || undefined, body: { prompts: listed() } });
  showState();
  if (answer.status === 412) return showConflict(answer);
  if (!answer.ok) return showFaults(answer);
  wasSaved = true;
  const top = dialog.scrollTop;
  await load();
  dialog.scrollTo(0, top);
  tell(answer.data.note);
}

function showFaults(answer) {
  tell("Not saved.");
  find(".faults").replaceChildren(...sentences(answer).map((text) => element("li", { className: "bad", textContent: text })));
  find(".faults").scrollIntoView({ block: "nearest" });
}

function showConflict(answer) {
  const theirs = element("button", { type: "button", textContent: "Take the file" });
  const mine = element("button", { type: "button", textContent: "Save mine over it" });
  theirs.addEventListener("click", load);
  mine.addEventListener("click", () => save(answer.etag));
  tell("The file has changed since it was opened. Nothing was saved. ", theirs, " ", mine);
  theirs.focus();
}

// ---- Closing ----

function leave(event) {
  event?.preventDefault();
  if (!isDirty()) return dialog.close();
  const discard = element("button", { type: "button", textContent: "Close without saving" });
  discard.addEventListener("click", () => dialog.close());
  tell("There are unsaved changes. ", discard);
  discard.focus();
}

dialog.addEventListener("cancel", leave);
dialog.addEventListener("close", () => {
  dialog.replaceChildren();
  // The config may name its file now: Settings reads it again.
  if (wasSaved) document.dispatchEvent(new Event("beat"));
});
dialog.addEventListener("input", showState);
dialog.addEventListener("submit", (event) => event.preventDefault());

const ACTS = { up: move, down: move, copy, remove };
dialog.addEventListener("click", ({ target }) => {
  const button = target.closest("button[value]");
  if (!button) return;
  const row = button.closest(".prompt-item");
  if (row) ACTS[button.value]?.(row, button);
  else if (button.value === "add") add();
  else if (button.value === "save") save();
  else if (button.value === "close") leave();
  if (dialog.open) showState();
});

dialog.addEventListener("keydown", (event) => {
  if ((event.ctrlKey || event.metaKey) && event.key === "s") {
    event.preventDefault();
    event.stopPropagation(); // Settings would save its config
    if (isDirty()) save();
  }
});
