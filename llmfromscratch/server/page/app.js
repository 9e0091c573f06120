// Starts the two halves of the page, and holds what belongs to neither: colours, and which half a phone shows.

import { learnModel, startChat } from "./chat.js";
import { startWatching } from "./watch.js";

const THEME = "llmfromscratch-theme";
const theme = document.getElementById("theme");

function dress(name) {
  if (name) document.documentElement.dataset.theme = name;
  else delete document.documentElement.dataset.theme;
}

theme.value = localStorage.getItem(THEME) ?? "";
dress(theme.value);
theme.addEventListener("change", () => {
  localStorage.setItem(THEME, theme.value);
  dress(theme.value);
});

function show(view) {
  document.body.dataset.view = view;
  for (const name of ["chat", "engine"]) {
    document.getElementById(`show-${name}`).setAttribute("aria-pressed", String(name === view));
  }
}

for (const name of ["chat", "engine"]) {
  document.getElementById(`show-${name}`).addEventListener("click", () => show(name));
}

startChat();
startWatching(learnModel);
