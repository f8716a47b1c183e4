//! Loop devices: a file as a block device.

use std::fs::{File, OpenOptions};
use std::io;
use std::mem;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

// From <linux/loop.h>; libc has none of them.
const LOOP_SET_FD: libc::c_ulong = 0x4C00;
const LOOP_CLR_FD: libc::c_ulong = 0x4C01;
const LOOP_SET_STATUS64: libc::c_ulong = 0x4C04;
const LOOP_CONFIGURE: libc::c_ulong = 0x4C0A;
const LOOP_CTL_GET_FREE: libc::c_ulong = 0x4C82;
const LO_FLAGS_READ_ONLY: u32 = 1;
const LO_FLAGS_AUTOCLEAR: u32 = 4;

/// How often another may take the device that was free.
const TRIES: u32 = 100;

/// struct loop_info64.
#[repr(C)]
struct Info {
    device: u64,
    inode: u64,
    rdevice: u64,
    offset: u64,
    size_limit: u64,
    number: u32,
    encrypt_type: u32,
    encrypt_key_size: u32,
    flags: u32,
    file_name: [u8; 64],
    crypt_name: [u8; 64],
    encrypt_key: [u8; 32],
    init: [u64; 2],
}

/// struct loop_config.
#[repr(C)]
struct Config {
    fd: u32,
    block_size: u32,
    info: Info,
    reserved: [u64; 8],
}

/// A loop device over a file, which the kernel frees when its last user (this value, then a mount) is gone.
#[derive(Debug)]
pub struct LoopDevice {
    /// `/dev/loopN`.
    pub path: PathBuf,
    _file: File,
}

impl LoopDevice {
    /// Takes a free device for `backing`.
    ///
    /// # Errors
    /// ENOENT without the loop driver, EACCES or EROFS for a file that cannot be written and is to be.
    pub fn attach(backing: &Path, read_only: bool) -> io::Result<Self> {
        let open = |path: &Path| OpenOptions::new().read(true).write(!read_only).open(path);
        let file = open(backing)?;
        let control = OpenOptions::new()
            .read(true)
            .write(true)
            .open("/dev/loop-control")?;
        let mut flags = LO_FLAGS_AUTOCLEAR;
        if read_only {
            flags |= LO_FLAGS_READ_ONLY;
        }
        for _ in 0..TRIES {
            // SAFETY: this request takes no argument and answers a number.
            let number = unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE as _) };
            if number < 0 {
                return Err(io::Error::last_os_error());
            }
            let path = PathBuf::from(format!("/dev/loop{number}"));
            let device = open(&path)?;
            match configure(&device, &file, flags) {
                Ok(()) => {
                    return Ok(Self {
                        path,
                        _file: device,
                    });
                }
                // Somebody was faster.
                Err(e) if e.raw_os_error() == Some(libc::EBUSY) => {}
                Err(e) => return Err(e),
            }
        }
        Err(io::Error::from_raw_os_error(libc::EBUSY))
    }
}

fn configure(device: &File, backing: &File, flags: u32) -> io::Result<()> {
    // SAFETY: all fields are integers or arrays of them, for which zero is a value.
    let mut config: Config = unsafe { mem::zeroed() };
    config.fd = backing.as_raw_fd() as u32; // never negative: it is open
    config.info.flags = flags;
    // SAFETY: the kernel reads a struct of the layout it documents, which lives through the call.
    let done = unsafe { libc::ioctl(device.as_raw_fd(), LOOP_CONFIGURE as _, &raw const config) };
    if done == 0 {
        return Ok(());
    }
    match io::Error::last_os_error() {
        // Before Linux 5.8: two steps.
        e if e.raw_os_error() == Some(libc::EINVAL) => in_two_steps(device, backing, &config.info),
        e => Err(e),
    }
}

fn in_two_steps(device: &File, backing: &File, info: &Info) -> io::Result<()> {
    // SAFETY: takes the number of a descriptor that is open through the call.
    if unsafe { libc::ioctl(device.as_raw_fd(), LOOP_SET_FD as _, backing.as_raw_fd()) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel reads a struct of the layout it documents, which lives through the call.
    if unsafe { libc::ioctl(device.as_raw_fd(), LOOP_SET_STATUS64 as _, info) } < 0 {
        let error = io::Error::last_os_error();
        // SAFETY: takes no argument.
        unsafe { libc::ioctl(device.as_raw_fd(), LOOP_CLR_FD as _, 0) };
        return Err(error);
    }
    Ok(())
}
