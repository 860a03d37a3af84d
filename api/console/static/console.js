// The behaviour of pages: refresh after changes, open dialogs, and announce results.
"use strict";
{
  const byId = (id) => document.getElementById(id);
  const dialog = byId("dialog");
  const announcement = byId("announcement");

  // --- announcements ---

  let clearTimer;
  function announce(text, stays = false) {
    announcement.textContent = text;
    clearTimeout(clearTimer);
    if (!stays) clearTimer = setTimeout(() => { announcement.textContent = ""; }, 8000);
  }

  // --- colour theme ---

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

  // --- live updates ---

  // One stream per visible tab, and none for hidden ones: browsers limit the connections to one server.
  const updates = document.body.dataset.updates;
  let source = null;
  function follow() {
    if (!updates || source || document.hidden) return;
    source = new EventSource(updates);
    source.addEventListener("open", () => { showConnection("live", true); refresh(); });
    source.addEventListener("error", () => {
      showConnection("not connected", false);
      // The browser reconnects by itself unless the server denied the request.
      if (source && source.readyState === EventSource.CLOSED) {
        source = null;
        refresh(); // redirects to the login page if the login is no longer valid
        setTimeout(follow, 3000);
      }
    });
    source.addEventListener("changed", (event) => {
      const { topics, announcements } = JSON.parse(event.data);
      for (const topic of topics) htmx.trigger(document.body, `changed-${topic}`);
      if (announcements.length) announce(announcements.join("; "));
    });
  }
  function refresh() {
    htmx.trigger(document.body, "changed-all");
  }
  function showConnection(text, alive) {
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

  let opener = null; // the id of the element that opened the dialog; a refresh may have replaced the element
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
    if (event.target === dialog) dialog.close(); // a click on the backdrop
  });
  document.addEventListener("done", (event) => {
    byId("dialog-body").replaceChildren(); // at once: the event `close` fires only after htmx's last event
    dialog.close();
    announce(event.detail.text);
    refresh();
  });

  // --- errors ---

  document.addEventListener("htmx:beforeSwap", (event) => {
    const { xhr, target } = event.detail;
    if (xhr.status < 400) return;
    const type = xhr.getResponseHeader("Content-Type") ?? "";
    if (target.id === "dialog-body" && type.startsWith("text/html")) {
      event.detail.shouldSwap = true;
      event.detail.isError = false;
      return;
    }
    let reason = "the control plane cannot process the request at the moment";
    try {
      reason = JSON.parse(xhr.responseText).detail ?? reason;
    } catch {
      reason = new DOMParser().parseFromString(xhr.responseText, "text/html").querySelector("[role=alert]")?.textContent ?? reason;
    }
    if (xhr.status !== 401) announce(reason, true);
  });
  document.addEventListener("htmx:sendError", () => {
    showConnection("not connected", false);
    announce("The control plane does not respond. Envoys continue with their last configuration.", true);
  });

  // --- times in the user's time zone ---

  const dateAndTime = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });
  const timeOnly = new Intl.DateTimeFormat(undefined, { timeStyle: "medium" });
  function localise(element) {
    const now = new Date();
    for (const time of element.querySelectorAll("time[datetime]")) {
      const at = new Date(time.dateTime);
      time.title = time.dateTime;
      time.textContent = (at.toDateString() === now.toDateString() ? timeOnly : dateAndTime).format(at);
    }
  }
  htmx.onLoad(localise);

  follow();
}
