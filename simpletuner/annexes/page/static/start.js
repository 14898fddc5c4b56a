// The pane "Start": uploads files, asks what to learn from them, and starts the run.
import { api, ask, element, page, say, sentences } from "./common.js";
import { followList, forget, preview, showFiles } from "./drop.js";
import { chooseFolder } from "./folders.js";
import { maySwitch, openConfig } from "./app.js";
import { duration, gigabytes } from "./units.js";

const { suffixes, unread, files: most, bytes: largest } = page("#start-card").dataset;
const usable = new Set(suffixes.split(" "));
const unreadable = new Set(unread.split(" "));
const drop = page("#drop");
const form = page("#start-form");
const progress = page("#drop-progress");
const AT_ONCE = 3; // concurrent uploads
const NOT_SHOWN = /\.(txt|caption|jsonl|csv|zip)$/i;
let place = null; // the server's name for the folder of dropped files
let folder = ""; // the folder on the card
let lost = []; // files of the latest drop that were not saved
let seen = null; // what the server has found in the folder
let number = 0; // counts what was asked for, so that a late answer is dropped

function tell(text) {
  page("#start-told").textContent = text;
}

// Shows why a request was refused; nothing if it was not. What concerns the word stands beside its field.
function refuse({ ok, data }) {
  const problems = ok ? [] : data.problems;
  const ofWord = problems.filter(({ key }) => key === "trigger");
  const others = problems.filter(({ key }) => key !== "trigger");
  page("#start-word-told").textContent = messagesOf(ofWord);
  page("#start-refused").textContent = messagesOf(others);
  if (ofWord.length) form.elements.trigger.focus();
}

const messagesOf = (problems) => problems.map(({ message }) => message).join(" ");

// ---- Files ----

// The dropped files, with their relative paths.
async function* walk(entry, above = "") {
  const name = above + entry.name;
  if (entry instanceof File) yield { name, file: entry };
  if (entry.isFile) yield { name, file: await new Promise((resolve, reject) => entry.file(resolve, reject)) };
  const reader = entry.isDirectory && entry.createReader();
  if (!reader) return;
  let some; // a reader gives some entries at a time, and none at the end
  do {
    some = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
    for (const each of some) yield* walk(each, `${name}/`);
  } while (some.length);
}

// All files of a drop; if they are too many, one more than are allowed.
async function dropped(entries) {
  const found = [];
  for (const entry of entries) {
    for await (const each of walk(entry)) {
      found.push(each);
      if (found.length > most) return found;
    }
  }
  return found;
}

// Why a file is not sent.
function fault({ name, file }) {
  if (/(^|\/)\./.test(name)) return say("is hidden: its name starts with a dot");
  const suffix = name.slice(name.lastIndexOf(".")).toLowerCase();
  if (unreadable.has(suffix)) return say("is in a format that is not read: save pictures as .png or .jpg, clips as .mp4");
  if (!usable.has(suffix)) return say("is not a picture, a clip, a caption (.txt, .caption) or a zip");
  return file.size > largest ? say("is larger than {size}", { size: gigabytes(largest) }) : "";
}

function send(name, file, tick) {
  return new Promise((resolve) => {
    const request = new XMLHttpRequest(); // fetch does not report upload progress
    request.open("PUT", `/api/uploads/${[place.name, ...name.split("/")].map(encodeURIComponent).join("/")}`);
    request.setRequestHeader("Content-Type", "application/octet-stream");
    request.responseType = "json";
    request.upload.onprogress = ({ loaded }) => tick(Math.min(loaded, file.size));
    request.onloadend = () => {
      const reason = request.response?.problems?.[0].message ?? say("did not arrive: the connection broke; drop it again");
      resolve(request.status === 201 ? request.response : { saved: [], skipped: [{ file: name, reason }] });
    };
    request.send(file);
  });
}

// The files without the name of the folder that holds all of them, and a name for their new folder: of that folder, or of
// the first file if it is a zip; else empty.
function withoutTop(found) {
  const top = found[0].name.split("/")[0];
  const isFolder = found.every(({ name }) => name.startsWith(`${top}/`));
  const isNamed = isFolder || /\.zip$/i.test(top);
  const title = isNamed ? top.replace(/\.zip$/i, "") : "";
  if (!isFolder) return { title, files: found };
  return { title, files: found.map(({ name, file }) => ({ name: name.slice(top.length + 1), file })) };
}

// Sends what was dropped, and looks at the folder with it.
async function take(found) {
  if (!found.length) return;
  if (found.length > most) {
    const limit = Number(most).toLocaleString("en");
    tell(say("These are more than {most} files. Copy the folder into the project, then use it from there.", { most: limit }));
    return;
  }
  const { title, files } = withoutTop(found);
  lost = files.map((each) => ({ file: each.name, reason: fault(each) })).filter(({ reason }) => reason);
  const good = files.filter((each) => !fault(each));
  if (good.length && !place && !(await makePlace(title))) return;
  preview(good.filter(({ name }) => !NOT_SHOWN.test(name)));
  const saved = await sendAll(good);
  showSkipped(lost);
  if (saved || folder) await look(saved ? place.folder : folder, answers());
  else tell(say("None of these files can be used."));
}

// Makes a folder for the files; resolves to whether there is one.
async function makePlace(title) {
  const made = await api("/api/uploads", { method: "POST", body: { name: title } });
  if (!made.ok) {
    tell(sentences(made).join(" "));
    return false;
  }
  place = made.data;
  forget();
  return true;
}

// Resolves to the number of saved files, which are more than were sent if a zip is among them.
async function sendAll(files) {
  const queue = [...files];
  const all = files.length;
  const sent = new Map();
  let saved = 0;
  progress.hidden = !all;
  progress.max = Math.max(1, queue.reduce((sum, { file }) => sum + file.size, 0));
  const work = async () => {
    for (let each = queue.shift(); each; each = queue.shift()) {
      const { name, file } = each;
      tell(say("Sending {name}, {number} of {all}", { name, number: all - queue.length, all }));
      const answer = await send(name, file, (bytes) => {
        sent.set(name, bytes);
        progress.value = [...sent.values()].reduce((sum, size) => sum + size, 0);
      });
      saved += answer.saved.length;
      lost.push(...answer.skipped);
    }
  };
  await Promise.all(Array.from({ length: AT_ONCE }, work));
  progress.hidden = true;
  return saved;
}

function showSkipped(skipped, more = 0) {
  const box = page("#start-skipped");
  const count = skipped.length + more;
  const lines = skipped.slice(0, 200).map(({ file, reason }) => (
    element("li", {}, element("span", { className: "key", textContent: file }), `: ${reason}`)
  ));
  box.hidden = !count;
  box.querySelector("summary").textContent = say(count === 1 ? "1 file was skipped" : "{count} files were skipped", { count });
  box.querySelector("ul").replaceChildren(...lines);
}

drop.addEventListener("dragover", (event) => {
  event.preventDefault();
  drop.classList.add("over");
});
drop.addEventListener("dragleave", () => drop.classList.remove("over"));
drop.addEventListener("drop", async (event) => {
  event.preventDefault();
  drop.classList.remove("over");
  const entries = [...event.dataTransfer.items].map((item) => item.webkitGetAsEntry() ?? item.getAsFile());
  await take(await dropped(entries.filter(Boolean)));
});
for (const input of drop.querySelectorAll("input")) {
  const choose = () => {
    const found = [...input.files].map((file) => ({ name: file.webkitRelativePath || file.name, file }));
    input.value = ""; // so that the same files can be chosen again
    take(found);
  };
  input.addEventListener("change", choose);
  choose(); // files chosen before this script was loaded
}
page("#drop-here").addEventListener("click", async () => {
  const chosen = await chooseFolder(folder);
  if (!chosen) return;
  [place, lost] = [null, []];
  forget();
  await look(chosen);
});

// ---- Answers ----

const chosen = (name) => form.elements[name]?.value ?? "";
const answers = () => ({
  purpose: chosen("purpose"),
  trigger: chosen("trigger"),
  model: chosen("model"),
  resolution: Number(form.dataset.resolution) || null,
});

function choices(box, name, labels, value) {
  const rows = Object.entries(labels).map(([each, label]) => {
    const button = element("input", { type: "radio", name, value: each, checked: each === value });
    return element("label", { className: "choice" }, button, ` ${say(label)}`, element("span", { className: "dim" }));
  });
  box.replaceChildren(...rows);
}

// Requests what is in the folder, and shows it with the answers that suit it.
async function look(path, given = {}) {
  const mine = (number += 1);
  const answer = await api("/api/start/look", { method: "POST", body: { folder: path, ...given } });
  if (mine !== number) return;
  form.hidden = !answer.ok;
  if (!answer.ok) return tell(sentences(answer).join(" "));
  const isNew = path !== folder;
  [folder, seen] = [path, answer.data];
  drop.classList.add("filled");
  page("#start-columns").hidden = false;
  showFacts();
  showSkipped([...lost, ...seen.skipped], seen.more_skipped);
  choices(page("#start-purposes"), "purpose", seen.purposes, seen.purpose);
  showModels();
  const nameBox = form.elements.name;
  const isOfUser = form.dataset.named || document.activeElement === nameBox;
  if (isNew || !isOfUser) nameBox.value = seen.name;
  page("#drop-discard").hidden = !seen.is_new;
  showCaptions();
  showFiles(folder, answers());
  await judge(mine);
}

// The models for these files; the one that was chosen stays chosen if it is among them.
function showModels() {
  const titles = Object.fromEntries(Object.entries(seen.models).map(([model, { title }]) => [model, title]));
  const model = chosen("model") in titles ? chosen("model") : Object.keys(titles)[0];
  choices(page("#start-models"), "model", titles, model);
}

// The facts that depend on the model: its size, and which files are too small or too short for it.
async function lookForModel() {
  const mine = number;
  const model = chosen("model");
  const answer = await api("/api/start/look", { method: "POST", body: { folder, ...answers() } });
  if (mine !== number || model !== chosen("model") || !answer.ok) return;
  seen = answer.data;
  showFacts();
  showCaptions();
  showFiles(folder, answers());
}

function showFacts() {
  const heldOut = seen.held_out ? say("{count} of them are held out of training, to compare checkpoints on them.", { count: seen.held_out }) : "";
  tell(`${seen.described}. ${heldOut}`.trim());
  page("#start-notes").replaceChildren(...seen.notes.map((textContent) => element("li", { textContent })), ...sizeRemedy());
  page("#start-size").textContent = say("Trained at {size}.", { size: seen.size });
}

// A button that trains small files too, or that leaves them out again.
function sizeRemedy() {
  const isSmaller = Boolean(form.dataset.resolution);
  if (!isSmaller && !seen.smaller) return [];
  const text = isSmaller ? say("Leave small files out again") : say("Train the small ones too, all at {edge}x{edge}", { edge: seen.smaller });
  const button = element("button", { type: "button", id: "start-smaller", textContent: text });
  button.addEventListener("click", async () => {
    if (isSmaller) delete form.dataset.resolution;
    else form.dataset.resolution = seen.smaller;
    await look(folder, answers());
    page("#start-smaller")?.focus();
  });
  return [element("li", {}, button)];
}

function showCaptions() {
  page("#start-trigger").hidden = seen.purpose === "edit";
  page("#start-captions > .dim").textContent = aboutCaptions(seen);
  page("#write-captions").hidden = seen.locked;
  page("#write-captions").textContent = seen.uncaptioned ? say("Write captions") : say("Read the captions");
  page("#caption-rest").hidden = !mayCaption();
}

// How many files have captions, and what that means.
function aboutCaptions({ uncaptioned, files, purpose }) {
  if (!uncaptioned) return say("Every file has a caption.");
  if (uncaptioned < files) return say("{uncaptioned} of {files} files have no caption and are left out.", { uncaptioned, files });
  if (purpose === "edit") return say("An edit needs a caption for every picture: what is to be changed.");
  return say("No file has a caption, so each is trained with the words above. A caption for each is better.");
}

// Whether the model can write the missing captions.
const mayCaption = () => Boolean(seen.uncaptioned) && !seen.locked && Boolean(seen.models[chosen("model")]?.captions);

// Shows a summary of the plan of each model, and selects the first that fits.
async function judge(mine) {
  let isOpen = true;
  for (const model of Object.keys(seen.models)) {
    const input = form.querySelector(`[name=model][value="${model}"]`);
    const note = input.parentElement.lastChild;
    note.textContent = say("computing");
    const { data } = await api("/api/start/plan", { method: "POST", body: { ...answers(), folder, model } });
    if (mine !== number) return;
    const [fits, text] = verdict(data);
    note.textContent = text;
    if (fits && isOpen && !form.dataset.model && !input.checked) {
      input.checked = true;
      lookForModel();
    }
    isOpen &&= !fits;
  }
}

// Whether a plan fits, with its time and memory in a few words: the numbers that `simpletuner plan` shows.
function verdict({ device, model, memory, problems, seconds }) {
  const isTold = (key) => problems.some((problem) => problem.key === key);
  const fatal = problems.find((problem) => problem.fatal && problem.key !== "memory" && problem.kind !== "captions");
  if (fatal) return [false, `${fatal.key}: ${fatal.message}`];
  if (!device) return [false, say("the plan needs captions")];
  const loaded = model.download ? say(", {size} to download", { size: gigabytes(model.download) }) : "";
  const time = say("about {time} with previews", { time: duration(seconds.training + seconds.previews) });
  if (isTold("device")) return [false, say("no GPU can be used here; on the CPU {time}", { time: time + loaded })];
  if (isTold("memory")) return [false, say("does not fit {device}", { device: device.name })];
  const most = gigabytes(Math.max(...memory.map((phase) => phase.device)));
  return [true, say("fits, {time}, up to {memory} of memory", { time, memory: most }) + loaded];
}

form.addEventListener("change", ({ target }) => {
  const again = () => look(folder, { ...answers(), name: form.dataset.named ? chosen("name") : "" });
  if (target.name === "model") {
    form.dataset.model = target.value;
    lookForModel();
  }
  if (target.name === "purpose" || target.name === "trigger") again();
});

// At once, so that no answer under way replaces what is typed.
form.addEventListener("input", ({ target }) => {
  if (target.name === "name") form.dataset.named = target.value;
});

followList(() => look(folder, answers()), openWords);

// Asks for captions; the module is loaded only now.
async function openWords(name = "") {
  const { writeCaptions } = await import("./dropwords.js");
  const wantsStart = await writeCaptions(folder, answers(), name);
  await Promise.race([look(folder, answers()), new Promise((resolve) => setTimeout(resolve, 3000))]);
  if (wantsStart) form.requestSubmit(form.querySelector("[value=start]"));
  else page("#write-captions").focus();
}
page("#write-captions").addEventListener("click", () => openWords());
page("#caption-rest").addEventListener("click", () => submit("rest"));

// Asks what to do with many files that would be left out; resolves to "agree", "rest", "write" or "".
function askAbout(sentence) {
  const dialog = page("#start-ask");
  const rest = dialog.querySelector("[value=rest]");
  const agree = dialog.querySelector("[value=agree]");
  const write = dialog.querySelector("[value=write]");
  page("#start-ask-title").textContent = say("Leave so many files out?");
  dialog.querySelector(".what").textContent = sentence;
  agree.textContent = say("Start without them");
  rest.hidden = !mayCaption();
  write.hidden = seen.locked || !seen.uncaptioned;
  write.classList.toggle("primary", rest.hidden);
  agree.classList.toggle("primary", rest.hidden && write.hidden);
  return ask(dialog);
}

// Writes the config, then does what the button says: "start" or "queue" the run, only "write" the config, or "rest",
// which queues the missing captions before the run.
async function begin(how, agreed = false) {
  if (!(await maySwitch())) return;
  const name = form.dataset.named ? chosen("name") : "";
  const body = { ...answers(), folder, name, captions: how === "rest", agreed };
  const written = await api("/api/start/write", { method: "POST", body });
  const asked = written.status === 409 && written.data.problems.find(({ key }) => key === "left_out");
  if (asked) return settle(how, await askAbout(asked.message));
  refuse(written);
  if (!written.ok) return;
  const { config } = written.data;
  const begun = await go(how, written);
  refuse(begun);
  if (begun.ok) {
    clear();
    location.hash = how === "write" ? "dataset" : "run";
  }
  tell(begun.ok ? "" : say("config/{config} is written, and cannot start yet.", { config }));
  await openConfig(config);
}

// What follows the written config; resolves to the last answer.
async function go(how, written) {
  if (how === "write") return written;
  if (how === "rest") return queueBoth(written.data);
  return api(`/api/training/${how}`, { method: "POST", body: { config: written.data.config } });
}

async function settle(how, choice) {
  if (choice === "agree") await begin(how, true);
  if (choice === "rest") await begin("rest", true);
  if (choice === "write") await openWords();
}

// Queues the captions, and after them the training.
async function queueBoth({ config, dataset, trigger }) {
  const captions = await api("/api/library/describe", { method: "POST", body: { config, dataset, trigger, style: "long" } });
  return captions.ok ? api("/api/training/queue", { method: "POST", body: { config } }) : captions;
}

// Empties the card.
function clear() {
  number += 1; // answers under way are of no use
  form.hidden = true;
  form.reset();
  delete form.dataset.model;
  delete form.dataset.named;
  delete form.dataset.resolution;
  [place, folder, lost, seen] = [null, "", [], null];
  forget();
  showSkipped([]);
  page("#start-columns").hidden = true;
  page("#start-notes").replaceChildren();
  drop.classList.remove("filled");
}

page("#drop-discard").addEventListener("click", async () => {
  const dialog = page("#start-ask");
  page("#start-ask-title").textContent = say("Discard these files?");
  const what = say("The copies in {folder} are deleted, with the captions that were written here. Your own files stay where they are.", { folder });
  dialog.querySelector(".what").textContent = what;
  for (const value of ["rest", "write"]) dialog.querySelector(`[value=${value}]`).hidden = true;
  const agree = dialog.querySelector("[value=agree]");
  agree.textContent = say("Delete the copies");
  agree.classList.remove("primary");
  if ((await ask(dialog)) !== "agree") return;
  const answer = await api("/api/drop/discard", { method: "POST", body: { folder } });
  refuse(answer);
  if (!answer.ok) return;
  clear();
  tell("");
});

async function submit(how) {
  form.inert = true;
  await begin(how);
  form.inert = false;
}
form.addEventListener("submit", (event) => {
  event.preventDefault();
  submit(event.submitter?.value ?? "start");
});
