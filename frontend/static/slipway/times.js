// Relative times that stay true while the page is open, and countdowns. templatetags/slipway.py says the same on the server.

const UNITS = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];

export function agoText(moment, now = Date.now()) {
  const passed = (now - moment) / 1000;
  if (passed < 5) return "just now";
  for (const [size, unit] of UNITS) if (passed >= size) return `${Math.floor(passed / size)} ${unit} ago`;
  return "just now";
}

export function untilText(moment, now = Date.now()) {
  const left = Math.floor((moment - now) / 1000);
  if (left <= 0) return "now";
  const two = (value) => String(value).padStart(2, "0");
  const [days, hours] = [Math.floor(left / 86400), Math.floor(left / 3600) % 24];
  const [minutes, rest] = [Math.floor(left / 60) % 60, left % 60];
  if (days) return `in ${days} d ${hours} h`;
  if (hours) return `in ${hours} h ${two(minutes)} min`;
  return minutes ? `in ${minutes} min ${two(rest)} s` : `in ${rest} s`;
}

function countDown(root = document) {
  for (const element of root.querySelectorAll("time[data-until]")) {
    element.textContent = untilText(Date.parse(element.dateTime));
  }
}

export function refreshTimes(root = document) {
  countDown(root);
  for (const element of root.querySelectorAll("time[data-ago]")) {
    element.textContent = agoText(Date.parse(element.dateTime));
  }
}

export function startTimes() {
  setInterval(refreshTimes, 10000);
  setInterval(countDown, 1000);
}
