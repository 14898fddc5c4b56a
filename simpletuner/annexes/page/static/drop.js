// The files of a drop as thumbnails: what is wrong with them, and the choice of those that are left out.
import { api, element, page, say, sentences } from "./common.js";

const AT_FIRST = matchMedia("(max-width: 600px)").matches ? 12 : 24; // files shown
const MORE = 60; // further ones, and files in an answer of the server
const MOST_LOCAL = 200; // thumbnails that the browser makes itself; of the others, the server makes them as they come into view
const SIDE = 240; // of a thumbnail, in pixels
const list = page("#drop-list");
const kinds = page("#drop-kinds");
const looked = page("#drop-looked");
const more = page("#drop-more");
// What is shown; `number` counts what was asked for, so that a late answer is dropped.
const view = { folder: "", answers: {}, kind: "", shown: AT_FIRST, number: 0 };
const tiles = new Map(); // by name
let drawn = new Map(); // thumbnails made here, by name

// The name of a file, without its middle if it is long.
const brief = (name) => (name.length > 22 ? `${name.slice(0, 10)}…${name.slice(-10)}` : name);

// By kind: the title of its button, and the words on a thumbnail.
const FAULTS = {
  unreadable: [say("Unreadable"), (detail) => say("unreadable: it {detail}", { detail })],
  small: [say("Small"), (detail) => say("small: {detail}", { detail })],
  short: [say("Too short"), (detail) => say("too short: {detail}", { detail })],
  blurred: [say("Blurred"), () => say("blurred")],
  duplicate: [say("Duplicates"), (detail) => say("looks like {detail}", { detail: brief(detail) })],
  uncaptioned: [say("No caption"), () => say("no caption")],
  out: [say("Left out"), () => ""],
};

// ---- Thumbnails ----

// Shows files before they are sent: the browser draws the pictures that it can read.
export async function preview(files) {
  const first = files.filter(({ name }) => !tiles.has(name)).slice(0, MOST_LOCAL);
  page("#start-columns").hidden = false;
  for (const { name } of first.slice(0, AT_FIRST)) list.append(tileOf({ name }));
  for (const { name, file } of first) {
    const canvas = await draw(file);
    if (!canvas) continue;
    drawn.set(name, canvas);
    tiles.get(name)?.querySelector(".thumb").replaceChildren(canvas);
  }
}

async function draw(file) {
  const bitmap = await createImageBitmap(file, { resizeWidth: SIDE, resizeQuality: "medium" }).catch(() => null);
  if (!bitmap) return null; // a clip, a caption, or a format that only the server reads
  const canvas = element("canvas", { width: bitmap.width, height: bitmap.height });
  canvas.getContext("2d").drawImage(bitmap, 0, 0);
  bitmap.close();
  return canvas;
}

export const address = ({ path, stamp }, route = "thumbnail") => `/library/${route}?path=${encodeURIComponent(path)}&stamp=${stamp}`;

function tileOf({ name }) {
  if (tiles.has(name)) return tiles.get(name);
  const tile = element("li", {},
    element("button", { type: "button", className: "thumb" }),
    element("span", { className: "file-name", textContent: name, title: name }),
    element("span", { className: "badges" }),
    element("button", { type: "button", className: "leave" }),
  );
  tile.dataset.file = name;
  tile.querySelector(".thumb").ariaLabel = say("Caption of {name}", { name });
  tile.querySelector(".leave").hidden = true;
  if (drawn.has(name)) tile.querySelector(".thumb").append(drawn.get(name));
  tiles.set(name, tile);
  return tile;
}

// Brings a tile up to date; elements stay, so that none loses the focus.
function refresh(file) {
  const tile = tileOf(file);
  const thumb = tile.querySelector(".thumb");
  const leave = tile.querySelector(".leave");
  const isReadable = !file.faults.some(({ kind }) => kind === "unreadable");
  if (!thumb.firstChild && isReadable) thumb.append(element("img", { src: address(file), alt: "", loading: "lazy" }));
  tile.classList.toggle("out", file.out);
  tile.querySelector(".badges").replaceChildren(...badges(file));
  leave.hidden = false;
  leave.textContent = file.out ? say("Take in") : say("Leave out");
  leave.ariaLabel = `${leave.textContent}: ${file.name}`;
  return tile;
}

function badges({ faults, out, text, seconds }) {
  const made = faults.map(({ kind, detail, leaves_out }) => element("span", {
    className: `badge ${leaves_out ? "bad" : "warning"}`,
    textContent: FAULTS[kind][1](detail),
  }));
  if (out) made.push(element("span", { className: "badge bad", textContent: say("left out") }));
  if (seconds) made.push(element("span", { className: "badge", textContent: `${seconds.toFixed(1)} s` }));
  if (text) made.push(element("span", { className: "words", textContent: text }));
  return made;
}

// ---- The list ----

// Shows the files of a folder, and what is wrong with them as the server finds it out.
export async function showFiles(folder, answers) {
  if (folder !== view.folder) Object.assign(view, { kind: "", shown: AT_FIRST });
  Object.assign(view, { folder, answers });
  const mine = (view.number += 1);
  for (let isDone = false; !isDone; ) {
    const answer = await fetchFiles();
    if (mine !== view.number || !answer) return;
    show(answer);
    isDone = answer.looked >= answer.all;
  }
}

export const fetchPage = (folder, answers, kind, from) => api("/api/drop/files", { method: "POST", body: { ...answers, folder, kind, from } });

async function fetchFiles() {
  let whole = null;
  for (let from = 0; from < view.shown; from += MORE) {
    const { ok, data } = await fetchPage(view.folder, view.answers, view.kind, from);
    if (!ok) {
      looked.textContent = sentences({ ok, data }).join(" ");
      return null;
    }
    whole = whole ? { ...data, files: [...whole.files, ...data.files] } : data;
    if (from + MORE >= data.found) break;
  }
  return whole;
}

function show({ files, found, counts, looked: seen, all }) {
  const wanted = files.slice(0, view.shown).map(refresh);
  const before = [...list.children];
  const isSame = wanted.length === before.length && wanted.every((tile, index) => tile === before[index]);
  if (!isSame) list.replaceChildren(...wanted);
  more.hidden = found <= view.shown;
  looked.textContent = seen < all ? say("Looking at the files: {seen} of {all}", { seen, all }) : "";
  showKinds(counts, all);
}

function showKinds(counts, all) {
  const focused = document.activeElement?.closest("#drop-kinds button")?.value;
  const chips = [chip("", say("All"), all)];
  for (const [kind, [title]] of Object.entries(FAULTS)) {
    if (counts[kind]) chips.push(chip(kind, title, counts[kind]));
  }
  if (counts[view.kind]) chips.push(allButton(counts[view.kind]));
  if (chips.length > 1) kinds.replaceChildren(...chips);
  else kinds.replaceChildren(); // there is nothing to choose
  if (focused !== undefined) [...kinds.children].find(({ value }) => value === focused)?.focus();
}

function chip(kind, title, count) {
  const ariaPressed = String(kind === view.kind);
  return element("button", { type: "button", value: kind, className: "chip", ariaPressed, textContent: `${title} ${count}` });
}

// The button that leaves out all files of the chosen kind, or takes them in.
function allButton(count) {
  const text = view.kind === "out" ? say("Take all {count} in", { count }) : say("Leave out all {count}", { count });
  return element("button", { type: "button", className: "all", value: "all", textContent: text });
}

export function forget() {
  tiles.clear();
  drawn = new Map();
  list.replaceChildren();
  kinds.replaceChildren();
  Object.assign(view, { folder: "", kind: "", shown: AT_FIRST, number: view.number + 1 });
}

// ---- Leaving out ----

// Calls `changed` after files were left out or taken in, and `opened` with the name of a file whose caption is asked for.
export function followList(changed, opened) {
  const leave = async (what) => {
    const answer = await api("/api/drop/out", { method: "POST", body: { ...view.answers, folder: view.folder, ...what } });
    if (answer.ok) await changed();
    else looked.textContent = sentences(answer).join(" ");
  };
  list.addEventListener("click", ({ target }) => {
    const tile = target.closest("li");
    if (!tile || !view.folder) return;
    if (target.closest(".leave")) leave({ files: [tile.dataset.file], out: !tile.classList.contains("out") });
    else if (target.closest(".thumb")) opened(tile.dataset.file);
  });
  kinds.addEventListener("click", async ({ target }) => {
    const button = target.closest("button");
    if (!button) return;
    if (button.value === "all") {
      await leave({ kind: view.kind, out: view.kind !== "out" });
      view.kind = "";
    } else {
      Object.assign(view, { kind: button.value, shown: AT_FIRST });
    }
    await showFiles(view.folder, view.answers);
  });
  more.addEventListener("click", () => {
    view.shown += MORE;
    showFiles(view.folder, view.answers);
  });
}
