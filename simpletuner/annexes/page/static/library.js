// The files of a dataset, over the page. The address says which: #dataset/files/ID?words=…&only=…&page=…
import { api, element, page, sentences, state } from "./form.js";

const dialog = page("#library"), CLOSED = "#dataset/training_data";
let shown = "", timer;
const find = (selector) => dialog.querySelector(selector);
const fileOf = (card) => decodeURIComponent(card.dataset.file);

function asked() {
  const [place, query = ""] = location.hash.slice(1).split("?"), [, kind, dataset] = place.split("/");
  return kind === "files" ? { dataset: decodeURIComponent(dataset), query: new URLSearchParams(query) } : null;
}
const named = () => ({ config: state.config, dataset: asked().dataset });

function go(changes) {
  const { dataset, query } = asked();
  for (const [key, value] of Object.entries(changes)) value ? query.set(key, value) : query.delete(key);
  location.hash = `dataset/files/${encodeURIComponent(dataset)}${query.size ? `?${query}` : ""}`;
}

export async function show() {
  dialog.querySelector("textarea:focus")?.blur(); // saves it
  const wanted = asked();
  if (!wanted) return dialog.close();
  if (!dialog.open) dialog.showModal();
  await load(new URLSearchParams({ ...named(), ...Object.fromEntries(wanted.query) }));
}

// The policy of the page forbids styles in HTML.
function fill(place, html) {
  place.innerHTML = html;
  for (const each of place.querySelectorAll("[data-style]")) each.style.cssText = each.dataset.style;
}

async function load(query) {
  const mine = (shown = String(query));
  dialog.setAttribute("aria-busy", "true");
  const response = await fetch(`/library?${query}`).catch(() => null), text = await response?.text();
  if (mine !== shown) return;
  dialog.removeAttribute("aria-busy");
  if (response?.ok) {
    const focused = document.activeElement?.id, open = find(".change")?.open;
    fill(dialog, text);
    dialog.scrollTo(0, 0);
    if (open && find(".change")) find(".change").open = true;
    if (focused) document.getElementById(focused)?.focus();
    follow();
  } else {
    const problems = response ? sentences({ ok: false, data: JSON.parse(text) }) : ["The server does not answer."];
    const close = element("button", { type: "button", className: "close", textContent: "Close" });
    dialog.replaceChildren(element("h2", { id: "library-title", textContent: asked()?.dataset }), element("p", { className: "bad", textContent: problems.join(" ") }), close);
  }
}

// One file: what is saved answers with its card.
async function change(card, path, body, etag) {
  const said = card.querySelector(".said"), { ok, status, data } = await api(path, { method: "PUT", etag, body: { ...named(), file: fileOf(card), ...body } });
  if (!ok && status !== 412) return void (said.textContent = `Not saved: ${sentences({ ok, data }).join(" ")}`);
  const box = element("div");
  fill(box, data.card);
  const fresh = box.firstElementChild, typed = card.querySelector("textarea"), now = fresh.querySelector("textarea");
  if (ok && typed && typed === document.activeElement) {
    card.dataset.tag = fresh.dataset.tag; // the cursor stays where it is
    typed.defaultValue = now.value;
    said.textContent = data.note;
    return;
  }
  card.replaceWith(fresh);
  fresh.querySelector(".said").textContent = ok ? data.note : sentences({ ok, data }).join(" ");
  if (!ok) fresh.querySelector(".said").append(element("span", { textContent: ` It says now what you see; you had typed: ${typed.value}` }));
  if (path.endsWith("excluded")) fresh.querySelector(".exclude").focus();
}

const save = (card, area) => area.value !== area.defaultValue && change(card, "/api/library/caption", { text: area.value }, card.dataset.tag || undefined);

// All files: first a preview, then the change itself.
async function edit(body) {
  const { ok, data } = await api("/api/library/edit", { method: "POST", body: { ...named(), ...body } }), place = find(".changes");
  const told = sentences({ ok, data });
  if (!ok && data.count === undefined) return place.replaceChildren(element("p", { className: "bad", textContent: told.join(" ") }));
  if (data.backup) {
    await show();
    const undo = element("button", { type: "button", textContent: "Undo" });
    undo.addEventListener("click", () => edit({ undo: data.backup }));
    return find(".changes").replaceChildren(element("p", { textContent: `${data.count} captions changed. ${data.note} ` }), undo);
  }
  const lines = data.first.map(({ name, before, after }) => element("p", {}, element("b", { textContent: name }), element("del", { textContent: before }), element("ins", { textContent: after })));
  const notes = [...told, data.emptied && `${data.emptied} of them would be empty.`, data.unreadable.length && `Not readable: ${data.unreadable.join(", ")}.`];
  const apply = element("button", { type: "button", className: "primary", textContent: `Change ${data.count} captions`, disabled: !data.count });
  apply.addEventListener("click", () => edit({ ...body, seen: data.digest }));
  const heading = `${data.count} captions would change${data.count > lines.length ? `, of which these are the first ${lines.length}` : ""}.`;
  place.replaceChildren(element("p", { textContent: heading }), ...notes.filter(Boolean).map((textContent) => element("p", { className: "bad", textContent })), ...lines, apply);
  apply.focus();
}

// The process that writes captions, while it runs.
async function follow() {
  clearTimeout(timer);
  const { ok, data } = await api("/api/library/describe");
  if (!ok || !find(".changes") || data.dataset !== asked()?.dataset) return;
  const ended = !data.running && !find("[value=stop]").hidden;
  find("[value=stop]").hidden = !data.running;
  if (data.message) find(".changes").textContent = data.message;
  if (data.running) {
    find(".change").open = true;
    timer = setTimeout(follow, 2000);
  } else if (ended) show();
}

const ACTS = {
  replace: () => edit({ find: find(".find[type=text]").value, replace: find(".replace").value }),
  prefix: () => edit({ trigger: find(".trigger").value }),
  describe: async () => {
    const { ok, data } = await api("/api/library/describe", { method: "POST", body: { ...named(), style: page("#library-style").value, trigger: find(".trigger").value } });
    if (!ok) return void (find(".changes").textContent = sentences({ ok, data }).join(" "));
    follow();
  },
  stop: () => api("/api/library/describe/stop", { method: "POST", body: {} }),
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
addEventListener("beforeunload", (event) => [...dialog.querySelectorAll("textarea")].some((area) => area.value !== area.defaultValue) && event.preventDefault());
