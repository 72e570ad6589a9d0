//! Tables for people: plain columns, nothing wrapped.

use comfy_table::{CellAlignment, Table, presets};

/// A table without lines, whose columns from `numbers` on are right-aligned.
pub(super) fn table<'a>(header: impl IntoIterator<Item = &'a str>, numbers: usize) -> Table {
    let header: Vec<&str> = header.into_iter().collect();
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    if header.is_empty() {
        return table;
    }
    table.set_header(header);
    for column in table.column_iter_mut().skip(numbers) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}
