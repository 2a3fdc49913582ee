// Buys a login with the code in the address, and shows who is logged in. The cookie that the server sets can only read;
// the secret for changes stays in this tab.
"use strict";

const SECRET = "belfry_secret";
const part = (id) => document.getElementById(id);

function say(text) {
  part("state").textContent = text;
}

function show(id, visible) {
  part(id).hidden = !visible;
}

async function ask(method, path, body) {
  const headers = {};
  const secret = sessionStorage.getItem(SECRET);
  if (secret && path !== "/login") headers.authorization = "Bearer " + secret;
  if (body) headers["content-type"] = "application/json";
  const response = await fetch(path, { method, headers, body: body && JSON.stringify(body) });
  const text = await response.text();
  return { ok: response.ok, status: response.status, body: text ? JSON.parse(text) : null };
}

function loggedOut(text) {
  for (const id of ["me", "reading", "leave"]) show(id, false);
  show("how", true);
  say(text);
}

async function showMe() {
  let answer = await ask("GET", "/api/v1/me");
  if (answer.status === 401 && sessionStorage.getItem(SECRET)) {
    sessionStorage.removeItem(SECRET);
    answer = await ask("GET", "/api/v1/me");
  }
  if (answer.status === 401) return loggedOut("You are not logged in.");
  if (!answer.ok) return say(answer.body.detail);
  const me = answer.body;
  const canChange = sessionStorage.getItem(SECRET) !== null;
  part("actor").textContent = me.actor;
  part("scope").textContent = me.scope;
  part("until").textContent = me.expires_at ? new Date(me.expires_at).toLocaleString() : "no end";
  show("me", true);
  show("how", false);
  show("reading", !canChange && me.scope === "read");
  show("leave", canChange);
  part("leave").onclick = async () => {
    await ask("DELETE", "/api/v1/tokens/" + encodeURIComponent(me.actor));
    sessionStorage.removeItem(SECRET);
    loggedOut("You have logged out.");
  };
  say("You are logged in.");
}

async function start() {
  const code = location.hash.slice(1);
  // The code must not stay in the address bar or in the history.
  if (code) history.replaceState(null, "", location.pathname);
  if (code) {
    const answer = await ask("POST", "/login", { code });
    if (!answer.ok) return loggedOut(answer.body.detail + ".");
    sessionStorage.setItem(SECRET, answer.body.secret);
  }
  await showMe();
}

window.addEventListener("hashchange", () => location.hash && location.reload());
start().catch(() => say("The server does not answer. Is it still running?"));
