// Parts of a page that the server renders again when something they show has changed.
//
// <section data-fragment="/url" data-on="step.changed run.changed">: an event of a kind that begins with one of the words
// fetches the url and replaces the content. A part that holds the focus or a selection is left alone until it is let go.
// data-lazy asks at once, for what the page came without. data-every="20000" asks again that often too, for what changes without an event, such as the figures of a canary; data-every-moving="1500" does as long as the part holds something marked data-moving.

import { coalesced } from "./live.js";
import { refreshTimes } from "./times.js";

function inUse(element) {
  if (element.contains(document.activeElement) || element.querySelector("input:checked")) return true;
  const selection = document.getSelection();
  return Boolean(selection && !selection.isCollapsed && element.contains(selection.anchorNode));
}

function openDetails(element) {
  return [...element.querySelectorAll("details[id][open]")].map((details) => details.id);
}

async function refresh(element) {
  if (!element.isConnected || inUse(element) || document.hidden) {
    element.dataset.stale = "";
    return;
  }
  const response = await fetch(element.dataset.fragment, { headers: { "X-Slipway-Fragment": "1" } });
  if (!response.ok || response.redirected) {
    const note = element.querySelector("[data-lazy-note]");
    if (note) note.textContent = "This could not be read just now; it is asked for again with the next change.";
    return;
  }
  const html = await response.text();
  const open = openDetails(element);
  const scrolled = element.querySelector(".scroll")?.scrollTop ?? 0;
  element.innerHTML = html; // our own template's answer: everything foreign in it is escaped
  for (const id of open) document.getElementById(id)?.setAttribute("open", "");
  const scroller = element.querySelector(".scroll");
  if (scroller) scroller.scrollTop = scrolled;
  delete element.dataset.stale;
  refreshTimes(element);
}

export function startFragments(live) {
  const parts = [...document.querySelectorAll("[data-fragment]")].map((element) => ({
    element,
    kinds: element.dataset.on.split(" "),
    run: coalesced(() => refresh(element), Number(element.dataset.gap ?? 1000)),
  }));
  live.addEventListener("event", (event) => {
    for (const part of parts) if (part.kinds.some((kind) => kind === "." || event.detail.type.startsWith(kind))) part.run();
  });
  for (const part of parts) {
    if ("lazy" in part.element.dataset) part.run();
    const every = Number(part.element.dataset.every ?? 0);
    if (every) setInterval(() => live.paused || part.run(), every);
    const moving = Number(part.element.dataset.everyMoving ?? 0);
    if (moving) setInterval(() => live.paused || !part.element.querySelector("[data-moving]") || part.run(), moving);
  }
  const all = () => parts.forEach((part) => part.run());
  live.addEventListener("refresh", all);
  const stale = () => parts.filter((part) => "stale" in part.element.dataset).forEach((part) => part.run());
  document.addEventListener("visibilitychange", stale);
  document.addEventListener("focusout", () => setTimeout(stale, 50));
}
