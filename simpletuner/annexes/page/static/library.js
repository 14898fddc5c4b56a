// The files of a dataset, in a dialog over the page. The URL names it: #dataset/files/ID?words=…&only=…&order=…&page=…
import { api, element, isDirty, page, sentences, state } from "./form.js";
import { openConfig } from "./app.js";

const dialog = page("#library"), CLOSED = "#dataset/training_data";
const STYLE = "/static/library.css";
const LAST = 6; // lines of a process's output
const open = { hash: "", dataset: "" }; // the view shown; the URL may already name another
let latest = "", shown = "", news = null, saving, timer, comparing;
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
  if (unsaved().length || find("dialog") || page("#library-writer")) return void (location.hash = open.hash);
  const wanted = asked();
  if (location.hash !== open.hash) news = null;
  if (!wanted) return dialog.close();
  Object.assign(open, { hash: location.hash, dataset: wanted.dataset });
  await loadStyle();
  if (!dialog.open) dialog.showModal();
  await load(new URLSearchParams({ ...named(), ...Object.fromEntries(wanted.query) }));
}

// Resolves when the style is there: without it, the view would jump.
function loadStyle() {
  if (page(`[href="${STYLE}"]`)) return null;
  const link = element("link", { rel: "stylesheet", href: STYLE });
  document.head.append(link);
  return new Promise((resolve) => {
    link.onload = resolve;
    link.onerror = resolve;
  });
}

// Sets styles by script, since the page's policy forbids them in HTML.
function fill(place, html) {
  place.innerHTML = html;
  for (const each of place.querySelectorAll("[data-style]")) each.style.cssText = each.dataset.style;
}

async function load(query) {
  const mine = (latest = String(query));
  clearTimeout(comparing);
  dialog.setAttribute("aria-busy", "true");
  const response = await fetch(`/library?${query}`).catch(() => null), text = await response?.text();
  if (mine !== latest) return;
  dialog.removeAttribute("aria-busy");
  if (response?.ok) {
    const focused = document.activeElement?.id, tools = find(".change"), isSame = shown === mine;
    shown = mine;
    fill(dialog, text);
    if (!isSame) dialog.scrollTo(0, 0);
    keepTools(tools);
    showCaptioner();
    if (focused) document.getElementById(focused)?.focus();
    if (find(".comparing")) comparing = setTimeout(compareMore, 500);
    tellNews();
    follow();
  } else {
    const problems = response ? sentences({ ok: false, data: JSON.parse(text) }) : ["The server does not answer."];
    const close = element("button", { type: "button", className: "close", textContent: "Close" });
    dialog.replaceChildren(element("h2", { id: "library-title", textContent: open.dataset }), element("p", { className: "bad", textContent: problems.join(" ") }), close);
  }
}

// What was typed into the tools stays there.
function keepTools(tools) {
  const fresh = find(".change");
  if (!tools || !fresh || tools.dataset.dataset !== fresh.dataset.dataset) return;
  fresh.replaceWith(tools);
  tools.querySelector(".changes").replaceChildren();
}

// Files are compared for some seconds in each request. A caption being typed is not disturbed.
function compareMore() {
  const isBusy = unsaved().length || find("textarea:focus") || find("dialog") || page("#library-writer");
  if (isBusy) comparing = setTimeout(compareMore, 2000);
  else if (dialog.open) show();
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

// ---- Captions by a model ----

function serverAsked() {
  if (find("#library-by").value !== "server") return {};
  return { address: find(".address").value.trim(), model: find(".model").value.trim(), send: find(".consent input").checked };
}

async function describe() {
  const server = serverAsked();
  if (server.address === "") return find(".address").focus();
  const body = { ...named(), style: page("#library-style").value, trigger: find(".lead").value, ...server };
  const answer = await api("/api/library/describe", { method: "POST", body });
  refuseServer(answer);
  find("[value=stop]").hidden = !answer.ok;
  if (answer.ok) follow();
}

// Shows why a server is not asked; before pictures leave this machine, a box asks for consent.
function refuseServer(answer) {
  const asked = answer.data.problems?.find(({ key }) => key === "send");
  if (!asked) return void (find(".changes").textContent = sentences(answer).join(" "));
  find(".changes").textContent = "";
  find(".consent").hidden = false;
  find(".consent span").textContent = `${asked.message.trim()} Send them.`;
  find(".consent input").focus();
}

// Proposes the models that the server offers.
async function proposeModels() {
  const { address, send } = serverAsked();
  if (!address) return;
  const answer = await api("/api/library/models", { method: "POST", body: { address, send } });
  if (answer.ok) find("#library-models").replaceChildren(...answer.data.models.map((value) => element("option", { value })));
  else refuseServer(answer);
}

function showCaptioner() {
  const isServer = find("#library-by")?.value === "server";
  for (const part of dialog.querySelectorAll(".describe .server")) part.hidden = !isServer;
  if (!isServer) withdrawConsent();
}

// Consent is to one address.
function withdrawConsent() {
  const consent = find(".consent");
  if (!consent) return;
  consent.hidden = true;
  consent.querySelector("input").checked = false;
}

// One picture at a time, large.
async function write(name = "") {
  find("textarea:focus")?.blur(); // saves it
  await saving;
  const { writeCaptions } = await import("./librarywords.js");
  const problem = await writeCaptions(find(".writing"), named(), Object.fromEntries(asked().query), name);
  await show();
  if (problem) find(".changes").textContent = problem;
}

const ACTS = {
  replace: () => edit({ find: find("input.find").value, replace: find(".replace").value }),
  prefix: () => edit({ trigger: find(".trigger").value }),
  describe,
  write: () => write(),
  stop: () => api("/api/training/queue/remove", { method: "POST", body: { job: find("[value=stop]").name } }),
};

const VIEW = { "library-words": "words", "library-only": "only", "library-order": "order", "library-size": "size" };

dialog.addEventListener("change", ({ target }) => {
  if (target.matches("textarea")) save(target.closest("figure"), target);
  if (target.id in VIEW) go({ [VIEW[target.id]]: target.value, page: "" });
  if (target.id === "library-page") go({ page: target.value });
  if (target.id === "library-by") showCaptioner();
  if (target.matches(".address")) withdrawConsent();
  if (target.id === "library-by" || target.matches(".address")) proposeModels();
});
dialog.addEventListener("submit", (event) => event.preventDefault());
dialog.addEventListener("click", ({ target }) => {
  const card = target.closest("figure"), button = target.closest("button");
  if (button?.matches(".close")) location.hash = CLOSED;
  else if (button?.matches(".exclude")) change(card, "/api/library/excluded", { out: !card.classList.contains("excluded") });
  else if (button?.matches(".paint")) paint(card);
  else if (button?.matches(".write")) write(decodeURIComponent(card.dataset.file));
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
