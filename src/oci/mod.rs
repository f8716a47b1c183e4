//! Command lines of runc, crun, youki. STUB; public surface chosen by its writer.
