// Captions of a drop, one picture at a time: large, with a text box and keys to go on.
import { api, element, page, sentences } from "./common.js";
import { address, fetchPage, say } from "./drop.js";

const dialog = page("#drop-words"), area = page("#drop-words-text"), told = page("#drop-words-told");
const button = (value) => dialog.querySelector(`[value=${value}]`);
let files = [], found = 0, next = 0; // the files so far, the number of all, and the first that was not fetched
let at = 0, asked = {}, saving = Promise.resolve([true]);

const isAsked = ({ out, faults }) => !out && !faults.some(({ kind }) => kind === "unreadable");

// Fetches further files, without those that are not trained.
async function fetchMore() {
  const answer = await fetchPage(asked.folder, asked.answers, "", next);
  if (!answer.ok) return void (told.textContent = sentences(answer).join(" "));
  found = answer.data.found - (answer.data.counts.out ?? 0) - (answer.data.counts.unreadable ?? 0);
  next += answer.data.files.length;
  if (!answer.data.files.length) found = files.length;
  files.push(...answer.data.files.filter(isAsked));
}

// Asks for captions, from a file on or from the first that has none. Resolves to true if the user wants to start.
export async function writeCaptions(folder, answers, name = "") {
  [files, next, at, asked] = [[], 0, 0, { folder, answers }];
  told.textContent = "";
  await fetchMore();
  while (name && !files.some((file) => file.name === name) && files.length < found) await fetchMore();
  const first = files.findIndex((file) => (name ? file.name === name : !file.text));
  if (!files.length) return false;
  await show(Math.max(0, first));
  return new Promise((resolve) => {
    dialog.returnValue = "";
    dialog.onclose = () => resolve(dialog.returnValue === "start");
    dialog.showModal();
    area.focus();
  });
}

async function show(index) {
  if (index >= files.length && files.length < found) await fetchMore();
  at = Math.min(index, files.length - 1);
  const file = files[at];
  page("#drop-words-title").textContent = file.name;
  page("#drop-words-place").textContent = say("{number} of {count}", { number: at + 1, count: found });
  dialog.querySelector(".large").replaceChildren(picture(file));
  area.value = file.typed ?? file.text ?? "";
  area.readOnly = Boolean(file.locked);
  told.textContent = file.locked;
  button("back").disabled = at === 0;
  const after = files[at + 1];
  if (after && !after.is_clip) new Image().src = `${address(after)}&large=1`; // fetched before it is asked for
}

function picture(file) {
  if (!file.is_clip) return element("img", { src: `${address(file)}&large=1`, alt: file.name });
  return element("video", { src: address(file, "media"), poster: address(file), controls: true, loop: true, muted: true });
}

// Saves the caption of the shown file if it was changed. One goes on while it is sent; if that fails, its file is shown
// again with the reason and the text.
async function save() {
  const index = at, file = files[at], text = area.value.trim();
  if (file.locked || text === (file.text ?? "").trim()) return true;
  file.typed = text;
  const answer = await api("/api/drop/caption", { method: "PUT", etag: file.tag || undefined, body: { ...asked.answers, folder: asked.folder, file: file.name, text } });
  if (answer.data.file) file.tag = answer.data.file.tag;
  if (answer.ok) {
    file.text = answer.data.file.text;
    delete file.typed;
    return true;
  }
  await show(index);
  told.textContent = sentences(answer).join(" ");
  return false;
}

async function go(step) {
  saving = Promise.all([saving, save()]).then(([before, isSaved]) => [...before, isSaved]);
  if (step > 0 && at + 1 >= found) {
    page("#drop-words-place").textContent = say("That was the last one.");
    return button("start").focus();
  }
  await show(Math.max(0, at + step));
  area.focus();
}

async function leave(value) {
  const before = await saving, isSaved = await save();
  if (before.every(Boolean) && isSaved) dialog.close(value);
  saving = Promise.resolve([true]);
}

const ACTS = { back: () => go(-1), next: () => go(1), close: () => leave(""), start: () => leave("start") };
const act = (name) => ACTS[name]();
dialog.addEventListener("click", ({ target }) => target.value in ACTS && target.matches("button") && act(target.value));
dialog.addEventListener("cancel", (event) => { event.preventDefault(); act("close"); });
dialog.addEventListener("keydown", (event) => {
  const isText = event.target === area;
  // While a word is composed, as in Chinese, Enter ends the word.
  if (isText && event.key === "Enter" && !event.shiftKey && !event.isComposing) event.preventDefault(), act("next");
  if (event.key === "PageUp") event.preventDefault(), act("back");
  if (event.key === "PageDown") event.preventDefault(), act("next");
});
