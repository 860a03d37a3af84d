// What pages do beside showing: they follow changes, ask in dialogs, and say what happened.
"use strict";
{
  const byId = (id) => document.getElementById(id);
  const dialog = byId("dialog");
  const told = byId("told");

  // --- saying ---

  let silence;
  function say(text, lasting = false) {
    told.textContent = text;
    clearTimeout(silence);
    if (!lasting) silence = setTimeout(() => { told.textContent = ""; }, 8000);
  }

  // --- colours ---

  const theme = byId("theme");
  const isDark = () =>
    (document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  function showTheme() {
    theme.textContent = isDark() ? "Light" : "Dark";
    theme.setAttribute("aria-label", isDark() ? "Use light colours" : "Use dark colours");
  }
  theme.hidden = false;
  theme.addEventListener("click", () => {
    const chosen = isDark() ? "light" : "dark";
    localStorage.setItem("theme", chosen);
    document.documentElement.dataset.theme = chosen;
    showTheme();
    document.dispatchEvent(new Event("theme"));
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    showTheme();
    document.dispatchEvent(new Event("theme"));
  });
  showTheme();

  // --- following changes ---

  // One stream a tab, and none while nobody looks at it: browsers have few connections for one server.
  const changes = document.body.dataset.changes;
  let source = null;
  function follow() {
    if (!changes || source || document.hidden) return;
    source = new EventSource(changes);
    source.addEventListener("open", () => { pulse("live", true); refresh(); });
    source.addEventListener("error", () => {
      pulse("not connected", false);
      // A browser tries again by itself, unless it was refused.
      if (source && source.readyState === EventSource.CLOSED) {
        source = null;
        refresh(); // whose login is no longer good is led to where one logs in
        setTimeout(follow, 3000);
      }
    });
    source.addEventListener("changed", (event) => {
      const { topics, told: sentences } = JSON.parse(event.data);
      for (const topic of topics) htmx.trigger(document.body, `changed-${topic}`);
      if (sentences.length) say(sentences.join("; "));
    });
  }
  function refresh() {
    for (const topic of ["nodes", "envoys", "rollouts", "events"]) htmx.trigger(document.body, `changed-${topic}`);
  }
  function pulse(text, alive) {
    byId("pulse").hidden = false;
    byId("pulse").classList.toggle("lost", !alive);
    if (byId("pulse-text").textContent !== text) byId("pulse-text").textContent = text;
  }
  document.addEventListener("visibilitychange", () => {
    if (document.hidden && source) {
      source.close();
      source = null;
    } else {
      follow();
    }
  });
  addEventListener("pagehide", () => { source?.close(); source = null; });
  addEventListener("pageshow", follow);

  // --- dialogs ---

  let opener = null; // by its id: what opened the dialog may have been drawn anew meanwhile
  document.addEventListener("htmx:afterSwap", (event) => {
    const body = byId("dialog-body");
    if (event.detail.target !== body || !body.childElementCount) return;
    if (!dialog.open) {
      opener = document.activeElement?.id;
      dialog.showModal();
    }
    dialog.querySelector("[role=alert]")?.scrollIntoView({ block: "nearest" });
    (dialog.querySelector("[autofocus]") ?? dialog.querySelector("button"))?.focus();
  });
  dialog.addEventListener("close", () => {
    byId("dialog-body").replaceChildren();
    (opener && byId(opener) || byId("main")).focus();
  });
  dialog.addEventListener("click", (event) => {
    if (!event.target.closest("[data-close]")) return;
    event.preventDefault();
    dialog.close();
  });
  dialog.addEventListener("pointerdown", (event) => {
    if (event.target === dialog) dialog.close(); // beside what it holds
  });
  document.addEventListener("done", (event) => {
    byId("dialog-body").replaceChildren(); // at once: the event `close` comes only after this answer's last one
    dialog.close();
    say(event.detail.text);
    refresh();
  });

  // --- what goes wrong ---

  document.addEventListener("htmx:beforeSwap", (event) => {
    const { xhr, target } = event.detail;
    if (xhr.status < 400) return;
    const type = xhr.getResponseHeader("Content-Type") ?? "";
    if (target.id === "dialog-body" && type.startsWith("text/html")) {
      event.detail.shouldSwap = true;
      event.detail.isError = false;
      return;
    }
    let reason = "the control plane cannot do that now";
    try {
      reason = JSON.parse(xhr.responseText).detail ?? reason;
    } catch {
      reason = new DOMParser().parseFromString(xhr.responseText, "text/html").querySelector("[role=alert]")?.textContent ?? reason;
    }
    if (xhr.status !== 401) say(reason, true);
  });
  document.addEventListener("htmx:sendError", () => {
    pulse("not connected", false);
    say("The control plane does not answer. Envoys go on with what they have.", true);
  });

  // --- times, as the clock of the reader has them ---

  const inWords = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });
  const hour = new Intl.DateTimeFormat(undefined, { timeStyle: "medium" });
  function localise(element) {
    const now = new Date();
    for (const time of element.querySelectorAll("time[datetime]")) {
      const at = new Date(time.dateTime);
      time.title = time.dateTime;
      time.textContent = (at.toDateString() === now.toDateString() ? hour : inWords).format(at);
    }
  }
  htmx.onLoad(localise);

  follow();
}
