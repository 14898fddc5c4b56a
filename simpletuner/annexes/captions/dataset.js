"use strict";

const cards = [...document.querySelectorAll(".file-card")];
const buttons = [...document.querySelectorAll(".kinds button")];

// Near-duplicates are grouped while their filter is active; otherwise cards are sorted by name.
const places = new Map(cards.map((card, index) => [card, index]));
const group = (card) => Number(card.dataset.twin?.match(/\d+$/)?.[0] ?? 0);

function choose(kind) {
  for (const button of buttons) button.setAttribute("aria-pressed", String(button.dataset.kind === kind));
  for (const each of document.querySelectorAll("[data-kinds]")) {
    each.hidden = kind !== "" && !each.dataset.kinds.split(" ").includes(kind);
  }
  for (const grid of document.querySelectorAll(".cards")) {
    const sorted = [...grid.children].sort((a, b) =>
      (kind === "twin" ? group(a) - group(b) : 0) || places.get(a) - places.get(b));
    grid.append(...sorted);
  }
  for (const section of document.querySelectorAll("section.files")) {
    section.hidden = kind !== "" && !section.querySelector("[data-kinds]:not([hidden])");
  }
}

buttons.forEach((button) => button.addEventListener("click", () => choose(button.dataset.kind)));
document.querySelector(".kinds").hidden = buttons.length < 2;

// A click enlarges a file and shows its whole caption.
const viewer = document.getElementById("viewer");

function show(card) {
  const copy = card.cloneNode(true);
  copy.classList.add("large");
  viewer.replaceChildren(copy);
  if (!viewer.open) viewer.showModal();
}

function beside(step) {
  const visible = cards.filter((card) => !card.hidden);
  const now = visible.findIndex((card) => card.querySelector("img").src === viewer.querySelector("img").src);
  if (visible[now + step]) show(visible[now + step]);
}

cards.forEach((card) => card.querySelector(".frame").addEventListener("click", () => show(card)));
viewer.addEventListener("click", (event) => { if (event.target === viewer || event.target.closest(".frame")) viewer.close(); });
viewer.addEventListener("keydown", (event) => {
  if (event.key === "ArrowLeft") beside(-1);
  else if (event.key === "ArrowRight") beside(1);
});
