// What all scripts of the page use: requests to the server, elements, dialogs and the address.

export const page = (selector) => document.querySelector(selector);

// ---- Texts ----

const translated = {}; // by English text; empty in English
const { lang } = document.documentElement;

// Takes in the translations that the server has put into a part of the page, for the scripts of that part.
export function learn(part) {
  for (const words of part.querySelectorAll(".translations")) Object.assign(translated, JSON.parse(words.textContent));
}
learn(document);

// A text in the language of the page, with values in its named places.
export const say = (text, values = {}) => (translated[text] ?? text).replace(/{(\w+)}/g, (place, name) => values[name] ?? place);

// One of two texts, by the number that stands in its place {count}. Hindi has the singular also for zero.
export function sayCounted(count, one, several, values = {}) {
  const isOne = count === 1 || (count === 0 && lang === "hi");
  return say(isOne ? one : several, { count: count.toLocaleString("en"), ...values });
}

// ---- Requests ----

export async function api(path, { method = "GET", body, etag, signal } = {}) {
  const headers = { ...(body && { "Content-Type": "application/json" }), ...(etag && { "If-Match": etag }) };
  let response;
  try {
    response = await fetch(path, { method, headers, body: body && JSON.stringify(body), signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    watch();
    return { ok: false, status: 0, etag: null, data: { problems: [{ key: "", message: "The server does not answer.", fatal: true }] } };
  }
  const data = await response.json().catch(() => ({ problems: [{ key: "", message: response.statusText, fatal: true }] }));
  return { ok: response.ok, status: response.status, etag: response.headers.get("ETag"), data };
}

// Polls the server and shows a notice while it is unreachable. Sends the event "beat" at every response, and "back" when
// the server is reachable again.
export async function watch() {
  clearTimeout(timer);
  const notice = page("#away"), wasAway = !notice.hidden;
  const { ok, status, statusText } = await fetch("/health", { signal: AbortSignal.timeout(10000) }).catch(() => ({}));
  notice.hidden = Boolean(ok);
  if (!ok && !wasAway) notice.textContent = `The server ${status ? `answers "${status} ${statusText}"` : "does not answer"}. What you typed is kept; the page continues when the server is back.`;
  if (ok) document.dispatchEvent(new Event(wasAway ? "back" : "beat"));
  clearTimeout(timer);
  timer = setTimeout(watch, ok ? 5000 : 1500);
}
let timer = setTimeout(watch, 5000);

// The problems of a refused request.
export const sentences = ({ ok, data }) => (ok ? [] : data.problems.map(({ key, message }) => (key ? `${key}: ${message}` : message)));

export function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

// Keeps the open config in the URL, so that a reload opens it again.
export function remember(key, value) {
  const url = new URL(location);
  url.searchParams.set(key, value);
  history.replaceState(history.state, "", url);
}

// Shows a dialog; resolves to the value of the button, or "" on Escape.
export function ask(dialog) {
  return new Promise((resolve) => {
    dialog.returnValue = "";
    dialog.onclick = ({ target }) => target.matches(".tools-row button") && dialog.close(target.value);
    dialog.onclose = () => resolve(dialog.returnValue);
    dialog.showModal();
  });
}
