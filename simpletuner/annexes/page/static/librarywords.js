// Captions of a dataset, one picture at a time.
import { api, page, sentences } from "./common.js";
import { Writer } from "./writer.js";

const address = ({ path, stamp }, route = "thumbnail") => `/library/${route}?path=${encodeURIComponent(path)}&stamp=${stamp}`;
const say = (text, values = {}) => text.replace(/{(\w+)}/g, (_, name) => values[name]);

const SOME = 60; // files in a request

// The files of these names. named: the config and the dataset.
function sourceOf(named, names) {
  const fetchFiles = async (from) => {
    const some = names.slice(from, from + SOME);
    const answer = await api("/api/library/files", { method: "POST", body: { ...named, files: some } });
    if (!answer.ok) return { files: [], next: from, found: 0, problem: sentences(answer).join(" ") };
    return { files: answer.data.files, next: from + some.length, found: names.length, problem: "" };
  };
  const save = async (file, text) => {
    const answer = await api("/api/library/caption", { method: "PUT", etag: file.tag || undefined, body: { ...named, file: file.name, text } });
    return { ok: answer.ok, problem: sentences(answer).join(" "), file: answer.data.file };
  };
  return { fetchFiles, save, address, say };
}

// Asks for captions, from a file on or from the first that has none. query: what the view shows; its files are listed
// once, since captions change which are without, and their order. Resolves to why it cannot begin, or to "".
export async function writeCaptions(template, named, query, name = "") {
  const answer = await api(`/api/library/names?${new URLSearchParams({ ...query, ...named })}`);
  if (!answer.ok) return sentences(answer).join(" ");
  const dialog = document.importNode(template.content, true).firstElementChild;
  document.body.append(dialog);
  await new Writer(dialog, sourceOf(named, answer.data.names)).open(name);
  dialog.remove();
  return "";
}

export const isWriting = () => Boolean(page("#library-writer"));
