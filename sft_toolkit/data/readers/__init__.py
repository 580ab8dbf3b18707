"""One file per file type. A reader yields every row, broken ones with their `error`; `sources` decides what then."""
