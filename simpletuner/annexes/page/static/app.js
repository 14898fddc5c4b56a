// The shell of the page: its three places, and the config that Settings and Runs share. The address names both: the place
// as its anchor, the config and the run as its query.
import { learn, page, remember, watch } from "./common.js";

const inRun = document.body.classList.contains("in-run"); // the page of a run has no other place
const links = [...document.querySelectorAll(".places [data-place]")];
let loading = null; // the scripts of Settings

// ---- Places ----

const queried = (key) => new URLSearchParams(location.search).get(key);

// Where an address without an anchor leads.
function firstAnchor() {
  if (inRun || queried("run")) return "#run";
  if (queried("config")) return "#basic";
  return `#${document.body.dataset.first}`;
}

// All anchors but those of New and Runs are of parts of Settings.
function placeOf(anchor) {
  if (inRun) return "run";
  const [name] = anchor.slice(1).split("/");
  return ["start", "run"].includes(name) ? name : "settings";
}

async function show() {
  if (location.hash === "#content") return; // the link that skips the header
  const place = placeOf(location.hash);
  document.body.dataset.place = place;
  for (const link of links) showLink(link, link.dataset.place === place);
  if (place === "settings") {
    const settings = await loadSettings();
    settings?.showPart();
    return;
  }
  draw(page(`#pane-${place}`));
  scrollTo(0, 0);
}

function showLink(link, isHere) {
  const { place } = link.dataset;
  page(`#pane-${place}`).hidden = !isHere;
  if (!isHere) {
    link.removeAttribute("aria-current");
    return;
  }
  link.setAttribute("aria-current", "page");
  document.title = `${link.textContent} · simpletuner`;
  // Leads back to the same part; without a query, which would load the page anew.
  if (place === "settings") link.setAttribute("href", location.hash);
}

// Draws a place when it is first shown: Runs from its template, New from the server.
async function draw(pane) {
  const shell = pane.querySelector(":scope > template");
  if (shell) fill(pane, shell.content);
  const { from } = pane.dataset;
  if (!from) return;
  delete pane.dataset.from; // is asked for once
  pane.ariaBusy = "true";
  const answer = await fetch(from).catch(() => null);
  if (answer?.ok) {
    fill(pane, document.createRange().createContextualFragment(await answer.text()));
    return;
  }
  pane.dataset.from = from;
  watch();
}

// Its scripts are loaded in order; until then a place looks empty.
function fill(pane, content) {
  const scripts = [...content.querySelectorAll("script[src]")];
  for (const script of scripts) script.async = false;
  if (scripts.length) pane.ariaBusy = "true";
  scripts.at(-1)?.addEventListener("load", () => { pane.ariaBusy = null; });
  learn(content);
  pane.replaceChildren(content);
}

// ---- Settings ----

// Resolves to the module settings.js, with a config opened; to null if the server is unreachable.
function loadSettings() {
  loading ??= fetchSettings();
  return loading;
}

async function fetchSettings() {
  const pane = page("#pane-settings");
  const answer = await fetch("/settings").catch(() => null);
  if (!answer?.ok) {
    loading = null;
    pane.textContent = "The settings cannot be shown: the server does not answer.";
    watch();
    return null;
  }
  pane.ariaBusy = "true"; // until a config is open: what is typed before would be lost
  pane.replaceChildren(document.createRange().createContextualFragment(await answer.text()));
  document.body.append(...pane.querySelectorAll("dialog")); // New and Runs ask, too, while this pane is hidden
  const { collectFields } = await import("./form.js");
  collectFields(pane);
  const settings = await import("./settings.js");
  await settings.opening;
  return settings;
}
document.addEventListener("back", () => { if (!loading) show(); });

// Opens a config in Settings; if Settings was not shown yet, it will open it then. `from`: the config to copy, if the
// config is new.
export async function openConfig(name, from = name) {
  if (!loading && from === name) {
    remember("config", name);
    document.dispatchEvent(new CustomEvent("config", { detail: name }));
    return true;
  }
  const settings = await loadSettings();
  return Boolean(await settings?.openConfig(name, from));
}

// A run was chosen: Settings opens its config, unless something there is not saved.
export async function followRun(config) {
  if (!config || config === queried("config")) return;
  const settings = await loading;
  if (!settings?.isDirty()) await openConfig(config);
}

// Asks what to do with unsaved changes; resolves to whether to continue.
export async function maySwitch() {
  const settings = await loading;
  return settings ? settings.maySwitch() : true;
}

// Asks for the name of a new config, and for the config to copy.
export async function newConfig(copied = "") {
  const settings = await loadSettings();
  await settings?.newConfig(copied);
}

// The list of preview prompts is a dialog over any place.
document.addEventListener("click", async ({ target }) => {
  const button = target.closest("[data-prompts]");
  if (button) (await import("./prompts.js")).show(button.dataset.prompts || queried("config") || "config");
});

addEventListener("hashchange", show);
if (!location.hash) history.replaceState(history.state, "", firstAnchor());
show();
