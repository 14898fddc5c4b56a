// The pane "Start": uploads files, asks what to learn from them, and starts the run.
import { api, ask, element, page, say, sentences } from "./common.js";
import { followList, forget, preview, showFiles } from "./drop.js";
import { chooseFolder } from "./folders.js";
import { maySwitch, openConfig } from "./app.js";
import { duration, gigabytes } from "./units.js";

const { suffixes, unread, files: most, bytes: largest } = page("#start-card").dataset;
const usable = new Set(suffixes.split(" ")), unreadable = new Set(unread.split(" "));
const drop = page("#drop"), form = page("#start-form"), progress = page("#drop-progress");
const AT_ONCE = 3; // concurrent uploads
const NOT_SHOWN = /\.(txt|caption|jsonl|csv|zip)$/i;
let place = null; // the server's name for the folder of dropped files
let folder = "", lost = [], seen = null, number = 0; // lost: files of the latest drop that were not saved
const tell = (text) => { page("#start-told").textContent = text; };
const refuse = ({ ok, data }) => {
  const problems = ok ? [] : data.problems, ofWord = problems.filter(({ key }) => key === "trigger");
  page("#start-word-told").textContent = ofWord.map(({ message }) => message).join(" ");
  page("#start-refused").textContent = problems.filter((problem) => !ofWord.includes(problem)).map(({ message }) => message).join(" ");
  if (ofWord.length) form.elements.trigger.focus();
};

// ---- Files ----

// The dropped files, with their relative paths.
async function* walk(entry, above = "") {
  const name = above + entry.name;
  if (entry instanceof File) yield { name, file: entry };
  if (entry.isFile) yield { name, file: await new Promise((resolve, reject) => entry.file(resolve, reject)) };
  const reader = entry.isDirectory && entry.createReader();
  for (let some = [true]; reader && some.length; ) {
    some = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
    for (const each of some) yield* walk(each, `${name}/`);
  }
}

async function dropped(entries) {
  const found = [];
  for (const entry of entries) {
    for await (const each of walk(entry)) if (found.push(each) > most) return found;
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

async function take(found) {
  if (!found.length) return;
  if (found.length > most) return tell(say("These are more than {most} files. Copy the folder into the project, then use it from there.", { most: Number(most).toLocaleString("en") }));
  // Named after the dropped folder or zip.
  const top = found[0].name.split("/")[0], isFolder = found.every(({ name }) => name.startsWith(`${top}/`));
  const named = isFolder ? found.map(({ name, file }) => ({ name: name.slice(top.length + 1), file })) : found;
  lost = named.map((each) => ({ file: each.name, reason: fault(each) })).filter(({ reason }) => reason);
  const queue = named.filter((each) => !fault(each)), all = queue.length;
  if (all && !place) {
    const isNamed = isFolder || /\.zip$/i.test(top);
    const made = await api("/api/uploads", { method: "POST", body: { name: isNamed ? top.replace(/\.zip$/i, "") : "" } });
    if (!made.ok) return tell(sentences(made).join(" "));
    place = made.data;
    forget();
  }
  preview(queue.filter(({ name }) => !NOT_SHOWN.test(name)));
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
  showSkipped(lost);
  if (saved || folder) await look(saved ? place.folder : folder, answers());
  else tell(say("None of these files can be used."));
}

function showSkipped(skipped, more = 0) {
  const box = page("#start-skipped"), count = skipped.length + more;
  box.hidden = !count;
  box.querySelector("summary").textContent = say(count === 1 ? "1 file was skipped" : "{count} files were skipped", { count });
  box.querySelector("ul").replaceChildren(...skipped.slice(0, 200).map(({ file, reason }) => element("li", {}, element("span", { className: "key", textContent: file }), `: ${reason}`)));
}

drop.addEventListener("dragover", (event) => { event.preventDefault(); drop.classList.add("over"); });
drop.addEventListener("dragleave", () => drop.classList.remove("over"));
drop.addEventListener("drop", async (event) => {
  event.preventDefault();
  drop.classList.remove("over");
  await take(await dropped([...event.dataTransfer.items].map((item) => item.webkitGetAsEntry() ?? item.getAsFile()).filter(Boolean)));
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
const answers = () => ({ purpose: chosen("purpose"), trigger: chosen("trigger"), model: chosen("model"), resolution: Number(form.dataset.resolution) || null });

function choices(box, name, labels, value) {
  const rows = Object.entries(labels).map(([each, label]) => element("label", { className: "choice" }, element("input", { type: "radio", name, value: each, checked: each === value }), ` ${say(label)}`, element("span", { className: "dim" })));
  box.replaceChildren(...rows);
}

// Requests what is in the folder, and shows it with the answers that suit it.
async function look(path, given = {}) {
  const mine = (number += 1), answer = await api("/api/start/look", { method: "POST", body: { folder: path, ...given } });
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
  const models = Object.keys(seen.models), model = models.includes(chosen("model")) ? chosen("model") : models[0];
  choices(page("#start-models"), "model", Object.fromEntries(models.map((each) => [each, seen.models[each].title])), model);
  const nameBox = form.elements.name, isTyping = document.activeElement === nameBox;
  if (isNew || !(form.dataset.named || isTyping)) nameBox.value = seen.name;
  page("#drop-discard").hidden = !seen.is_new;
  showCaptions();
  showFiles(folder, answers());
  await judge(mine);
}

// The facts that depend on the model: its size, and which files are too small or too short for it.
async function lookForModel() {
  const mine = number, model = chosen("model"), answer = await api("/api/start/look", { method: "POST", body: { folder, ...answers() } });
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
  const { uncaptioned, files, purpose } = seen, isEdit = purpose === "edit", isNone = uncaptioned >= files;
  page("#start-trigger").hidden = isEdit;
  const text = !uncaptioned ? say("Every file has a caption.")
    : isEdit && isNone ? say("An edit needs a caption for every picture: what is to be changed.")
    : isNone ? say("No file has a caption, so each is trained with the words above. A caption for each is better.")
    : say("{uncaptioned} of {files} files have no caption and are left out.", seen);
  page("#start-captions > .dim").textContent = text;
  page("#write-captions").hidden = seen.locked;
  page("#write-captions").textContent = uncaptioned ? say("Write captions") : say("Read the captions");
  page("#caption-rest").hidden = !mayCaption();
}

const mayCaption = () => Boolean(seen.uncaptioned) && !seen.locked && Boolean(seen.models[chosen("model")]?.captions);

// Shows a summary of the plan of each model, and selects the first that fits.
async function judge(mine) {
  let isOpen = true;
  for (const model of Object.keys(seen.models)) {
    const input = form.querySelector(`[name=model][value="${model}"]`), note = input.parentElement.lastChild;
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
  if (fatal || !device) return [false, fatal ? `${fatal.key}: ${fatal.message}` : say("the plan needs captions")];
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
  const dialog = page("#start-ask"), rest = dialog.querySelector("[value=rest]"), agree = dialog.querySelector("[value=agree]"), write = dialog.querySelector("[value=write]");
  page("#start-ask-title").textContent = say("Leave so many files out?");
  dialog.querySelector(".what").textContent = sentence;
  agree.textContent = say("Start without them");
  rest.hidden = !mayCaption();
  write.hidden = seen.locked || !seen.uncaptioned;
  write.classList.toggle("primary", rest.hidden);
  agree.classList.toggle("primary", rest.hidden && write.hidden);
  return ask(dialog);
}

// Writes the config, then starts or queues the run; with "rest", the model first writes the missing captions.
async function begin(how, agreed = false) {
  if (!(await maySwitch())) return;
  const isRest = how === "rest", name = form.dataset.named ? chosen("name") : "";
  const body = { ...answers(), folder, name, captions: isRest, agreed };
  const written = await api("/api/start/write", { method: "POST", body });
  const asked = written.status === 409 && written.data.problems.find(({ key }) => key === "left_out");
  if (asked) return settle(how, await askAbout(asked.message));
  refuse(written);
  if (!written.ok) return;
  const { config } = written.data;
  const begun = isRest ? await queueBoth(written.data) : how === "write" ? written : await api(`/api/training/${how}`, { method: "POST", body: { config } });
  refuse(begun);
  if (begun.ok) {
    clear();
    location.hash = how === "write" ? "dataset" : "run";
  }
  tell(begun.ok ? "" : say("config/{config} is written, and cannot start yet.", { config }));
  await openConfig(config);
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
  dialog.querySelector(".what").textContent = say("The copies in {folder} are deleted, with the captions that were written here. Your own files stay where they are.", { folder });
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
