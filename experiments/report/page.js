// Click a heading to sort by it, again to reverse; rows without a number stay at the end.
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") === "ascending";
    heads.forEach((h) => h.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const key = (row) => {
      const cell = row.cells[column];
      return cell.dataset.key === undefined ? cell.textContent : Number(cell.dataset.key);
    };
    const rows = [...table.tBodies[0].rows];
    rows.sort((a, b) => {
      const [x, y] = [key(a), key(b)];
      if (typeof x !== typeof y) return typeof x === "number" ? -1 : 1;
      const order = typeof x === "number" ? x - y : x.localeCompare(y);
      return down ? -order : order;
    });
    table.tBodies[0].append(...rows);
  }));
}
