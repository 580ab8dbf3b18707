"""One file per row layout. Each turns a row (columns already renamed) into an example, or raises `RowError`."""
