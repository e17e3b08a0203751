//! Raw bindings to libcufile, opened at run time.
