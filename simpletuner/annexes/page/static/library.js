// The files of a dataset, in a dialog over the page. The URL names it: #dataset/files/ID?words=…&only=…&page=…
import { api, element, isDirty, page, sentences, state } from "./form.js";
import { openConfig } from "./app.js";

const dialog = page("#library"), CLOSED = "#dataset/training_data";
const LAST = 6; // lines of a process's output
const open = { hash: "", dataset: "" }; // the view shown; the URL may already name another
let latest = "", news = null, saving, timer;
const find = (selector) => dialog.querySelector(selector);
const named = () => ({ config: state.config, dataset: open.dataset });
const unsaved = () => [...dialog.querySelectorAll("textarea")].filter((area) => area.value !== area.defaultValue);

function asked() {
  const [place, query = ""] = location.hash.slice(1).split("?"), [, kind, dataset] = place.split("/");
  return kind === "files" ? { dataset: decodeURIComponent(dataset), query: new URLSearchParams(query) } : null;
}

function go(changes) {
  const { dataset, query } = asked();
  for (const [key, value] of Object.entries(changes)) value ? query.set(key, value) : query.delete(key);
  location.hash = `dataset/files/${encodeURIComponent(dataset)}${query.size ? `?${query}` : ""}`;
}

export async function show() {
  find("textarea:focus")?.blur(); // saves it
  await saving;
  // Unsaved captions show the reason on their card; the mask painter has a button for unsaved masks.
  if (unsaved().length || find("dialog")) return void (location.hash = open.hash);
  const wanted = asked();
  if (location.hash !== open.hash) news = null;
  if (!wanted) return dialog.close();
  Object.assign(open, { hash: location.hash, dataset: wanted.dataset });
  if (!dialog.open) dialog.showModal();
  await load(new URLSearchParams({ ...named(), ...Object.fromEntries(wanted.query) }));
}

// Sets styles by script, since the page's policy forbids them in HTML.
function fill(place, html) {
  place.innerHTML = html;
  for (const each of place.querySelectorAll("[data-style]")) each.style.cssText = each.dataset.style;
}

async function load(query) {
  const mine = (latest = String(query));
  dialog.setAttribute("aria-busy", "true");
  const response = await fetch(`/library?${query}`).catch(() => null), text = await response?.text();
  if (mine !== latest) return;
  dialog.removeAttribute("aria-busy");
  if (response?.ok) {
    const focused = document.activeElement?.id, unfolded = find(".change")?.open;
    fill(dialog, text);
    dialog.scrollTo(0, 0);
    if (find(".change")) find(".change").open = Boolean(unfolded);
    if (focused) document.getElementById(focused)?.focus();
    tellNews();
    follow();
  } else {
    const problems = response ? sentences({ ok: false, data: JSON.parse(text) }) : ["The server does not answer."];
    const close = element("button", { type: "button", className: "close", textContent: "Close" });
    dialog.replaceChildren(element("h2", { id: "library-title", textContent: open.dataset }), element("p", { className: "bad", textContent: problems.join(" ") }), close);
  }
}

// A single file: the response to a change contains its new card.
async function change(card, path, body, etag) {
  const file = decodeURIComponent(card.dataset.file), { ok, status, data } = await api(path, { method: "PUT", etag, body: { ...named(), file, ...body } });
  const said = card.querySelector(".said"), typed = card.querySelector("textarea"), box = element("div");
  if (!ok && status !== 412) return void (said.textContent = `Not saved: ${sentences({ ok, data }).join(" ")}`);
  fill(box, data.card);
  const fresh = box.firstElementChild, now = fresh.querySelector("textarea");
  if (ok && typed !== document.activeElement) {
    fresh.querySelector(".said").textContent = data.note;
    // Another response may have replaced the card in the meantime.
    find(`[data-file="${card.dataset.file}"]`)?.replaceWith(fresh);
    if (path.endsWith("excluded")) fresh.querySelector(".exclude").focus();
    return;
  }
  card.dataset.tag = fresh.dataset.tag;
  if (ok) {
    typed.defaultValue = now.value; // the cursor stays where it is
    return void (said.textContent = data.note);
  }
  const mine = element("button", { type: "button", textContent: "Save mine" }), theirs = element("button", { type: "button", textContent: "Take the file's" });
  mine.addEventListener("click", () => save(card, typed));
  theirs.addEventListener("click", () => card.replaceWith(fresh));
  said.replaceChildren(sentences({ ok, data }).join(" "), element("ins", { textContent: now?.value ?? "" }), mine, " ", theirs);
}

function save(card, area) {
  if (area.value !== area.defaultValue) saving = Promise.all([saving, change(card, "/api/library/caption", { text: area.value }, card.dataset.tag || undefined)]);
}

// Shows the result of saving a mask, also if it reloads all files.
function tellNews() {
  const said = news && find(`[data-file="${news[0]}"] .said`);
  if (said) said.textContent = news[1];
}

async function paint(card) {
  const file = decodeURIComponent(card.dataset.file), { paint: start } = await import("./mask.js");
  await start(card, { ...named(), file }, async ({ card: html, note, others }) => {
    news = [card.dataset.file, note];
    fill(card, html);
    card.replaceWith(card.firstElementChild);
    if (!others) tellNews();
    else if (isDirty()) await show();
    else await openConfig(state.config); // reloads the changed dataset file, and the files
  });
}

const counted = (count) => `${count} ${count === 1 ? "caption" : "captions"}`;

// Changes of all captions: first a preview, then the change.
async function edit(body) {
  const { ok, data } = await api("/api/library/edit", { method: "POST", body: { ...named(), ...body } }), place = find(".changes");
  const told = sentences({ ok, data });
  if (!ok && data.count === undefined) return place.replaceChildren(element("p", { className: "bad", textContent: told.join(" ") }));
  if (data.backup) {
    await show();
    const undo = element("button", { type: "button", textContent: "Undo" });
    undo.addEventListener("click", () => edit({ undo: data.backup }));
    return find(".changes").replaceChildren(element("p", { textContent: `${counted(data.count)} changed. ${data.note} ` }), undo);
  }
  const lines = data.first.map(({ name, before, after }) => element("p", {}, element("b", { textContent: name }), element("del", { textContent: before }), element("ins", { textContent: after })));
  const notes = [...told, data.emptied && `${data.emptied} of them would be empty.`, data.unreadable.length && `Not readable: ${data.unreadable.join(", ")}.`,
    data.linked.length && `Not changed, since they are behind links out of the project: ${data.linked.join(", ")}.`];
  const apply = element("button", { type: "button", className: "primary", textContent: `Change ${counted(data.count)}`, disabled: !data.count });
  apply.addEventListener("click", () => edit({ ...body, seen: data.digest }));
  const heading = `${counted(data.count)} would change${data.count > lines.length ? `, of which these are the first ${lines.length}` : ""}.`;
  place.replaceChildren(element("p", { textContent: heading }), ...notes.filter(Boolean).map((textContent) => element("p", { className: "bad", textContent })), ...lines, apply);
  apply.focus();
}

// The captioning job, while it waits or runs.
async function follow() {
  clearTimeout(timer);
  const { ok, data } = await api("/api/library/describe"), stop = find("[value=stop]");
  if (!ok || !stop || data.config !== state.config || data.dataset !== open.dataset || (!data.running && stop.hidden)) return;
  if (!data.running) await show(); // the new captions
  find(".change").open = true;
  find(".changes").textContent = data.message.split("\n").slice(-LAST).join("\n") || "Starting.";
  Object.assign(find("[value=stop]"), { hidden: !data.running, name: data.job });
  if (data.running) timer = setTimeout(follow, 2000);
}

const ACTS = {
  replace: () => edit({ find: find(".find[type=text]").value, replace: find(".replace").value }),
  prefix: () => edit({ trigger: find(".trigger").value }),
  describe: async () => {
    const { ok, data } = await api("/api/library/describe", { method: "POST", body: { ...named(), style: page("#library-style").value, trigger: find(".trigger").value } });
    find(".changes").textContent = sentences({ ok, data }).join(" ");
    find("[value=stop]").hidden = !ok;
    if (ok) follow();
  },
  stop: () => api("/api/training/queue/remove", { method: "POST", body: { job: find("[value=stop]").name } }),
};

dialog.addEventListener("change", ({ target }) => {
  if (target.matches("textarea")) save(target.closest("figure"), target);
  if (target.matches("#library-only, #library-words")) go({ only: page("#library-only").value, words: page("#library-words").value, page: "" });
});
dialog.addEventListener("submit", (event) => event.preventDefault());
dialog.addEventListener("click", ({ target }) => {
  const card = target.closest("figure"), button = target.closest("button");
  if (button?.matches(".close")) location.hash = CLOSED;
  else if (button?.matches(".exclude")) change(card, "/api/library/excluded", { out: !card.classList.contains("excluded") });
  else if (button?.matches(".paint")) paint(card);
  else if (ACTS[button?.value]) ACTS[button.value]();
});
// Ctrl-Enter saves a caption and goes on to the next.
dialog.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey) || !event.target.matches("textarea")) return;
  const areas = [...dialog.querySelectorAll("textarea")], next = areas[areas.indexOf(event.target) + 1];
  next ? next.focus() : event.target.blur();
});
for (const [event, act] of Object.entries({ mouseover: "play", focusin: "play", mouseout: "pause", focusout: "pause" })) {
  dialog.addEventListener(event, ({ target }) => target.closest(".frame")?.querySelector("video")?.[act]()?.catch(() => {}));
}
dialog.addEventListener("cancel", (event) => { event.preventDefault(); location.hash = CLOSED; });
addEventListener("beforeunload", (event) => unsaved().length && event.preventDefault());
document.addEventListener("back", () => unsaved().forEach((area) => save(area.closest("figure"), area)));
