//! Extended attributes of an open file.
//!
//! Promises that no path is looked up, so that no link is followed.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Sets the attribute `name` to `value`, whether the file has it already or not.
///
/// # Errors
/// Those of fsetxattr(2); EOPNOTSUPP where the filesystem keeps no such attribute.
pub fn set(file: BorrowedFd<'_>, name: &CStr, value: &[u8]) -> io::Result<()> {
    // SAFETY: the name is NUL-terminated, the value is read for its length; both live through the call.
    let done = unsafe {
        libc::fsetxattr(
            file.as_raw_fd(),
            name.as_ptr(),
            value.as_ptr().cast(),
            value.len(),
            0,
        )
    };
    if done < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    /// Everybody may ask for a label; what is refused here is the name.
    #[test]
    fn an_attribute_of_no_namespace_is_not_supported() {
        let file = tempfile::tempfile().expect("make a file");
        let error = set(file.as_fd(), c"podvisor", b"x").expect_err("set");
        assert_eq!(error.raw_os_error(), Some(libc::EOPNOTSUPP));
    }
}
