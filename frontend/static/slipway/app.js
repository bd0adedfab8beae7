// What every page does: theme, live stream, fragments, dialogs, shortcuts, times. No page depends on it to be read.

import { LiveClient, liveUrl } from "./live.js";
import { startFragments } from "./fragments.js";
import { startShortcuts } from "./shortcuts.js";
import { startTheme } from "./theme.js";
import { startTimes } from "./times.js";

function announce(text) {
  const region = document.getElementById("announcer");
  if (region) region.textContent = text;
}

// A link marked data-act leads to a page that asks for a reason. Its form is shown in a dialog; where that cannot be
// fetched, or asks for a login, the page itself is opened.
async function openAct(link) {
  const dialog = document.getElementById("act");
  if (dialog.open) return;
  try {
    const response = await fetch(link.href, { headers: { "X-Slipway-Fragment": "1" } });
    if (!response.ok || response.redirected) throw new Error(`answered ${response.status}`);
    dialog.innerHTML = await response.text(); // our own template's answer: everything foreign in it is escaped
    dialog.showModal();
  } catch {
    location.assign(link.href);
  }
}

function startDialogs() {
  document.addEventListener("click", (event) => {
    if (event.target.closest("[data-close]")) event.target.closest("dialog").close();
    const link = event.target.closest("a[data-act]");
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    openAct(link);
  });
}

function startForms() {
  for (const element of document.querySelectorAll("[data-no-script]")) element.hidden = true;
  for (const form of document.querySelectorAll("form[data-submit-on-change]")) {
    form.addEventListener("change", () => form.requestSubmit());
  }
  document.addEventListener("click", async (event) => {
    const button = event.target.closest("[data-copy]");
    if (!button) return;
    await navigator.clipboard.writeText(document.getElementById(button.dataset.copy).textContent);
    announce("Copied");
  });
}

const LABELS = { live: "Live", slow: "Live, by asking", offline: "Not connected", paused: "Paused" };

function startLive() {
  const box = document.getElementById("live");
  if (!box) return null;
  const label = document.getElementById("live-label");
  const toggle = document.getElementById("live-toggle");
  const client = new LiveClient({ url: liveUrl(), topics: JSON.parse(box.dataset.topics) });
  client.addEventListener("state", (event) => {
    if (box.dataset.state === event.detail && label.textContent === LABELS[event.detail]) return;
    box.dataset.state = event.detail;
    label.textContent = LABELS[event.detail];
  });
  toggle.addEventListener("click", () => {
    if (client.paused) client.resume();
    else client.pause();
    toggle.textContent = client.paused ? "Go on" : "Pause";
    toggle.setAttribute("aria-pressed", String(client.paused));
  });
  return client;
}

startTheme();
startTimes();
startDialogs();
startForms();
startShortcuts();
export const live = startLive();
if (live) {
  startFragments(live);
  live.start();
}
