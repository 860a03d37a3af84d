// The charts of a node's traffic in the last ten minutes.
"use strict";
addEventListener("DOMContentLoaded", () => {
  const section = document.getElementById("charts");
  if (!section) return;
  const refreshMilliseconds = 5000;
  const spanSeconds = 600;
  const formats = {
    sessions: (value) => Math.round(value).toLocaleString("en"),
    rate: (value) => (value > 0 && value < 9.95 ? value.toFixed(1) : Math.round(value).toLocaleString("en")),
    p95: (value) => (value >= 1 ? `${value.toFixed(2)} s` : value * 1000 >= 9.95 ? `${Math.round(value * 1000)} ms` : `${+(value * 1000).toFixed(2)} ms`),
  };
  const minutes = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit" });
  const hour = (at) => minutes.format(at * 1000);
  let plots = [];
  let columns = null;

  // A canvas needs computed colours, not CSS variables; read them from an element's `color`.
  function computedColor(name) {
    const probe = document.createElement("i");
    probe.style.color = `var(${name})`;
    section.append(probe);
    const color = getComputedStyle(probe).color;
    probe.remove();
    return color;
  }

  function draw() {
    for (const plot of plots) plot.destroy();
    plots = [];
    if (!columns) return;
    const line = computedColor("--accent");
    const quiet = computedColor("--quiet");
    const grid = computedColor("--line");
    for (const container of section.querySelectorAll(".chart")) {
      const name = container.dataset.column;
      const axis = { stroke: quiet, grid: { stroke: grid, width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
      plots.push(new uPlot({
        width: container.clientWidth,
        height: 160,
        legend: { show: false },
        cursor: { y: false, drag: { x: false } },
        scales: {
          x: { range: () => { const now = columns.at.at(-1) ?? Date.now() / 1000; return [now - spanSeconds, now]; } },
          y: { range: (_, __, max) => [0, (max || 0) * 1.15 || 1] },
        },
        axes: [{ ...axis, size: 28, values: (_, ticks) => ticks.map(hour) }, { ...axis, size: 58, values: (_, ticks) => ticks.map(formats[name]) }],
        padding: [8, 8, 0, 0],
        series: [{}, { stroke: line, width: 2, fill: line.replace("rgb(", "rgba(").replace(")", ", 0.12)"), points: { show: false } }],
        hooks: { setCursor: [(plot) => showValue(name, plot.cursor.idx)] },
      }, [columns.at, columns[name]], container));
    }
    for (const name of Object.keys(formats)) showValue(name, null);
  }

  function showValue(name, index) {
    const value = index == null ? columns[name].findLast((entry) => entry !== null) : columns[name][index];
    document.getElementById(`now-${name}`).textContent = value == null ? "–" : formats[name](value);
  }

  async function load() {
    if (document.hidden) return;
    try {
      const response = await fetch(`/console/history?${new URLSearchParams({ node: section.dataset.node })}`);
      if (!response.ok) return;
      columns = await response.json();
    } catch {
      return; // the page shows the connection state
    }
    if (!plots.length) return draw();
    for (const [index, name] of Object.keys(formats).entries()) {
      plots[index].setData([columns.at, columns[name]]);
      if (plots[index].cursor.left < 0) showValue(name, null);
    }
  }

  new ResizeObserver(() => {
    const containers = section.querySelectorAll(".chart");
    plots.forEach((plot, index) => plot.setSize({ width: containers[index].clientWidth, height: 160 }));
  }).observe(section);
  document.addEventListener("theme", draw);
  document.addEventListener("visibilitychange", load);
  setInterval(load, refreshMilliseconds);
  load();
});
