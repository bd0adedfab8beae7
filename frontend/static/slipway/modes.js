// Several ways to write the same thing: shows the part of the form that is chosen, and hides the others.

const form = document.querySelector("form[data-modes]");
if (form) {
  const show = () => {
    const mode = form.elements.mode.value;
    for (const part of form.querySelectorAll("[data-mode-part]")) {
      const on = part.dataset.modePart === mode;
      part.hidden = !on;
      // A hidden field must not stop the form from being sent.
      for (const field of part.querySelectorAll("input, select, textarea")) field.disabled = !on && field.type === "number";
    }
  };
  for (const choice of form.elements.mode) choice.addEventListener("change", show);
  show();
}
