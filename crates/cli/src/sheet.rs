//! Tables that fit the terminal: what matters least is left out first, nothing is cut.

use crate::words::one_line;
use comfy_table::{Cell, CellAlignment, Color, ColumnConstraint, ContentArrangement, Table};

/// A column of a table.
#[derive(Debug, Clone, Copy)]
pub struct Column {
    name: &'static str,
    /// The higher, the earlier it is left out; 0 stays.
    rank: u8,
    right: bool,
    /// Texts in it that are longer than this may be broken into lines.
    wraps: Option<u16>,
}

/// A column that is always shown.
pub const fn column(name: &'static str) -> Column {
    Column { name, rank: 0, right: false, wraps: None }
}

impl Column {
    /// It may be left out; the higher the rank, the earlier.
    pub const fn rank(self, rank: u8) -> Column {
        Column { rank, ..self }
    }

    /// Its content stands on the right.
    pub const fn right(self) -> Column {
        Column { right: true, ..self }
    }

    /// What is longer than this is broken where there is no room.
    pub const fn wraps(self, from: u16) -> Column {
        Column { wraps: Some(from), ..self }
    }
}

/// No column is broken into lines shorter than this.
const WRAPPED_MIN: u16 = 12;

/// A table.
pub struct Sheet {
    columns: Vec<Column>,
    rows: Vec<(Vec<String>, Vec<Option<Color>>)>,
}

impl Sheet {
    pub fn new(columns: &[Column]) -> Sheet {
        Sheet { columns: columns.to_vec(), rows: Vec::new() }
    }

    /// Adds a row. Text in it may come from outside: each cell is one line.
    pub fn row(&mut self, cells: Vec<String>) -> &mut Sheet {
        let cells: Vec<String> = cells.iter().map(|cell| one_line(cell, usize::MAX)).collect();
        let colours = vec![None; cells.len()];
        self.rows.push((cells, colours));
        self
    }

    /// Gives a cell of the last row a colour.
    pub fn colour(&mut self, column: &str, colour: Option<Color>) -> &mut Sheet {
        let index = self.columns.iter().position(|known| known.name == column);
        if let (Some(index), Some((_, colours))) = (index, self.rows.last_mut()) {
            colours[index] = colour;
        }
        self
    }

    /// The table as text, as wide as the terminal at most.
    pub fn render(&self) -> String {
        self.render_within(width())
    }

    fn render_within(&self, width: Option<u16>) -> String {
        // A column that says nothing is no column.
        let mut shown: Vec<usize> = (0..self.columns.len())
            .filter(|index| {
                self.columns[*index].rank == 0 || self.rows.iter().any(|(row, _)| !row[*index].is_empty())
            })
            .collect();
        while let Some(width) = width
            && self.width_with(&shown, None) > usize::from(width)
            && let Some(last) = shown
                .iter()
                .copied()
                .filter(|index| self.columns[*index].rank > 0)
                .max_by_key(|index| self.columns[*index].rank)
        {
            shown.retain(|index| *index != last);
        }
        let mut table = self.table(&shown);
        if let Some(width) = width {
            table.set_content_arrangement(ContentArrangement::Dynamic);
            // Better a line too long than a letter on each.
            let least = u16::try_from(self.width_with(&shown, Some(WRAPPED_MIN))).unwrap_or(width);
            table.set_width(width.max(least));
        }
        // Whoever prints takes colours out where they are not wanted.
        table.enforce_styling();
        table.trim_fmt() + "\n"
    }

    /// How wide it is with what may be broken as wide as it should be, or as given.
    fn width_with(&self, shown: &[usize], wrapped: Option<u16>) -> usize {
        let widths = self.table(shown).column_max_content_widths();
        let wrapped = |index: usize, width: u16| {
            self.columns[index].wraps.map_or(width, |from| width.min(wrapped.unwrap_or(from)))
        };
        let widths = shown.iter().zip(widths).map(|(index, width)| usize::from(wrapped(*index, width)) + 2);
        widths.sum::<usize>().saturating_sub(2)
    }

    fn table(&self, shown: &[usize]) -> Table {
        let mut table = Table::new();
        table.load_style(comfy_table::presets::NOTHING);
        table.set_header(shown.iter().map(|index| self.columns[*index].name));
        for (row, colours) in &self.rows {
            table.add_row(shown.iter().map(|index| {
                let cell = Cell::new(&row[*index]);
                colours[*index].map_or(cell.clone(), |colour| cell.fg(colour))
            }));
        }
        for (column, index) in table.column_iter_mut().zip(shown) {
            let is_last = shown.last() == Some(index);
            column.set_padding((0, if is_last { 0 } else { 2 }));
            if self.columns[*index].right {
                column.set_cell_alignment(CellAlignment::Right);
            }
            if self.columns[*index].wraps.is_none() {
                column.set_constraint(ColumnConstraint::ContentWidth);
            }
        }
        table
    }
}

/// How wide tables may be: `COLUMNS`, or the terminal; anything where there is none.
pub fn width() -> Option<u16> {
    let named = std::env::var("COLUMNS").ok().and_then(|columns| columns.parse().ok());
    named.filter(|columns| *columns >= 20).or_else(|| Table::new().width())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sheet() -> Sheet {
        let mut sheet = Sheet::new(&[
            column("NEXT"),
            column("LEFT").right(),
            column("LAST").rank(2),
            column("EMPTY").rank(1),
            column("NAME").wraps(40),
        ]);
        let row = |cells: [&str; 5]| cells.map(str::to_owned).to_vec();
        sheet.row(row(["12:00", "5s", "yesterday", "", "prices/poll"]));
        sheet.row(row(["13:00", "1h5s", "today", "", "reporter/morning"]));
        sheet
    }

    #[test]
    fn no_cell_begins_a_line_of_its_own() {
        let mut sheet = Sheet::new(&[column("CHECK"), column("DETAIL").wraps(24)]);
        sheet.row(vec!["paused".into(), "a\nactive  yes\r\n\u{2028}b\tc\x1b[8m".into()]);
        assert_eq!(sheet.render_within(None), "CHECK   DETAIL\npaused  a active yes b c [8m\n");
    }

    #[test]
    fn what_matters_least_is_left_out_first() {
        let wide = sheet().render_within(Some(60));
        assert_eq!(
            wide,
            "NEXT   LEFT  LAST       NAME\n12:00    5s  yesterday  prices/poll\n13:00  1h5s  today      reporter/morning\n"
        );
        let narrow = sheet().render_within(Some(30));
        assert_eq!(narrow, "NEXT   LEFT  NAME\n12:00    5s  prices/poll\n13:00  1h5s  reporter/morning\n");
        assert!(sheet().render_within(Some(20)).contains("5s  prices/poll"), "never a letter a line");
    }
}
