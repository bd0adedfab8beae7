// The form of a new run: a chosen task set brings what its environment was made for. What was typed by hand stays.

const suggested = JSON.parse(document.getElementById("suggested")?.textContent ?? "{}");
const form = document.getElementById("run-form");
const chosen = document.getElementById("f-task_set");
if (form && chosen) {
  const typed = new Set();
  form.addEventListener("input", (event) => typed.add(event.target.name));
  chosen.addEventListener("change", () => {
    for (const [name, value] of Object.entries(suggested[chosen.value] ?? {})) {
      if (!typed.has(name)) form.elements[name].value = value;
    }
  });
}
