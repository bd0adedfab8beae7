// The token view: what is pointed at, or walked to with the arrow keys, is told in the line below.

function describe(token) {
  const [position, id, logprob, version] = token.dataset.t.split(" ");
  const text = JSON.stringify(token.textContent);
  if (!token.classList.contains("on")) return `${text} · position ${position} · id ${id} · not trained on`;
  const probability = Math.exp(Number(logprob)).toPrecision(3);
  return `${text} · position ${position} · id ${id} · logprob ${logprob} · probability ${probability} · version ${version}`;
}

for (const box of document.querySelectorAll("[data-tokens]")) {
  const detail = box.parentElement.querySelector(".token-detail");
  const tokens = [...box.querySelectorAll(".tok")];
  let picked = null;
  const pick = (token) => {
    picked?.classList.remove("picked");
    picked = token;
    picked.classList.add("picked");
    detail.textContent = describe(token);
  };
  box.addEventListener("pointerover", (event) => {
    const token = event.target.closest(".tok");
    if (token) pick(token);
  });
  box.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!move || !tokens.length) return;
    event.preventDefault();
    const next = picked ? tokens.indexOf(picked) + move : 0;
    const token = tokens[Math.max(0, Math.min(tokens.length - 1, next))];
    pick(token);
    token.scrollIntoView({ block: "nearest" });
  });
}
