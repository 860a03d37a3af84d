// The charts of a node: what it carried in the last ten minutes.
"use strict";
addEventListener("DOMContentLoaded", () => {
  const section = document.getElementById("charts");
  if (!section) return;
  const every = 5000;
  const span = 600;
  const formats = {
    sessions: (value) => Math.round(value).toLocaleString("en"),
    rate: (value) => (value > 0 && value < 9.95 ? value.toFixed(1) : Math.round(value).toLocaleString("en")),
    p95: (value) => (value >= 1 ? `${value.toFixed(2)} s` : value * 1000 >= 9.95 ? `${Math.round(value * 1000)} ms` : `${+(value * 1000).toFixed(2)} ms`),
  };
  const minutes = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit" });
  const hour = (at) => minutes.format(at * 1000);
  let plots = [];
  let columns = null;

  // A canvas wants colours that are worked out; an element's `color` is.
  function resolved(name) {
    const probe = document.createElement("i");
    probe.style.color = `var(${name})`;
    section.append(probe);
    const found = getComputedStyle(probe).color;
    probe.remove();
    return found;
  }

  function draw() {
    for (const plot of plots) plot.destroy();
    plots = [];
    if (!columns) return;
    const line = resolved("--accent");
    const quiet = resolved("--quiet");
    const grid = resolved("--line");
    for (const place of section.querySelectorAll(".chart")) {
      const name = place.dataset.column;
      const axis = { stroke: quiet, grid: { stroke: grid, width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
      plots.push(new uPlot({
        width: place.clientWidth,
        height: 160,
        legend: { show: false },
        cursor: { y: false, drag: { x: false } },
        scales: {
          x: { range: () => { const now = columns.at.at(-1) ?? Date.now() / 1000; return [now - span, now]; } },
          y: { range: (_, __, most) => [0, (most || 0) * 1.15 || 1] },
        },
        axes: [{ ...axis, size: 28, values: (_, ticks) => ticks.map(hour) }, { ...axis, size: 58, values: (_, ticks) => ticks.map(formats[name]) }],
        padding: [8, 8, 0, 0],
        series: [{}, { stroke: line, width: 2, fill: line.replace("rgb(", "rgba(").replace(")", ", 0.12)"), points: { show: false } }],
        hooks: { setCursor: [(plot) => tell(name, plot.cursor.idx)] },
      }, [columns.at, columns[name]], place));
    }
    for (const name of Object.keys(formats)) tell(name, null);
  }

  function tell(name, index) {
    const value = index == null ? columns[name].findLast((each) => each !== null) : columns[name][index];
    document.getElementById(`now-${name}`).textContent = value == null ? "–" : formats[name](value);
  }

  async function load() {
    if (document.hidden) return;
    try {
      const answer = await fetch(`/console/history?${new URLSearchParams({ node: section.dataset.node })}`);
      if (!answer.ok) return;
      columns = await answer.json();
    } catch {
      return; // the page says so itself
    }
    if (!plots.length) return draw();
    for (const [number, name] of Object.keys(formats).entries()) {
      plots[number].setData([columns.at, columns[name]]);
      if (plots[number].cursor.left < 0) tell(name, null);
    }
  }

  new ResizeObserver(() => {
    const places = section.querySelectorAll(".chart");
    plots.forEach((plot, number) => plot.setSize({ width: places[number].clientWidth, height: 160 }));
  }).observe(section);
  document.addEventListener("theme", draw);
  document.addEventListener("visibilitychange", load);
  setInterval(load, every);
  load();
});
