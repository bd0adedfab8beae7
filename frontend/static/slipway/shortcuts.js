// Keyboard shortcuts, with an off switch (WCAG 2.1.4). Whatever carries data-shortcut="g r" is a shortcut.

const STORE = "slipway.shortcuts";
const WAIT_MS = 1200;

function enabled() {
  return localStorage.getItem(STORE) !== "off";
}

function typing(target) {
  return target.isContentEditable || /^(INPUT|TEXTAREA|SELECT)$/.test(target.tagName);
}

function nameOf(element) {
  return element.dataset.shortcutLabel || element.getAttribute("aria-label") || element.textContent.trim();
}

function fillList(list) {
  const rows = [...document.querySelectorAll("[data-shortcut]")].map((element) => {
    const term = document.createElement("dt");
    for (const key of element.dataset.shortcut.split(" ")) {
      const cap = document.createElement("kbd");
      cap.textContent = key;
      term.append(cap, " ");
    }
    const what = document.createElement("dd");
    what.textContent = nameOf(element);
    return [term, what];
  });
  list.replaceChildren(...rows.flat());
}

export function startShortcuts() {
  const dialog = document.getElementById("shortcuts");
  const box = document.getElementById("shortcuts-enabled");
  if (!dialog) return;
  const show = () => {
    fillList(document.getElementById("shortcut-list"));
    dialog.showModal();
  };
  document.getElementById("help-toggle").addEventListener("click", show);
  box.checked = enabled();
  box.addEventListener("change", () => localStorage.setItem(STORE, box.checked ? "on" : "off"));

  let first = "";
  let timer = null;
  document.addEventListener("keydown", (event) => {
    if (!enabled() || event.ctrlKey || event.metaKey || event.altKey || typing(event.target)) return;
    if (document.querySelector("dialog[open]") || event.key.length !== 1) return;
    const pressed = first ? `${first} ${event.key}` : event.key;
    const target = document.querySelector(`[data-shortcut="${CSS.escape(pressed).replaceAll("\\ ", " ")}"]`);
    clearTimeout(timer);
    first = "";
    if (target) {
      event.preventDefault();
      if (typing(target)) target.focus();
      else target.click();
    } else if (event.key === "g") {
      first = "g";
      timer = setTimeout(() => { first = ""; }, WAIT_MS);
    }
  });
}
