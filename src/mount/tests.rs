//! Mounts for real, on tmpfs of our own in a private mount namespace of the test's thread.

use super::*;
use std::os::unix::fs::{MetadataExt, symlink};

/// Runs `work` on a thread with its own mount namespace and a tmpfs; mounts die with the thread. Needs root.
fn private(work: impl FnOnce(&Path) + Send) {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("skipped: mounting needs root");
        return;
    }
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            #[allow(clippy::disallowed_methods, reason = "this thread ends with the test")]
            nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS).unwrap();
            let none = None::<&str>;
            mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).unwrap();
            let dir = tempfile::tempdir().unwrap();
            mount(Some("t"), dir.path(), Some("tmpfs"), MsFlags::empty(), none).unwrap();
            work(dir.path());
            umount2(dir.path(), MntFlags::MNT_DETACH).unwrap();
        });
        thread.join().unwrap();
    });
}

fn wanted(kind: &str, source: &Path, target: &str, options: &[&str]) -> Mount {
    Mount {
        kind: kind.into(),
        source: source.to_str().unwrap().into(),
        target: target.into(),
        options: options.iter().map(|o| (*o).into()).collect(),
    }
}

/// For lists that need no room for what is mounted meanwhile, and no program.
fn mount_plainly(mounts: &[Mount], root: &Path) -> Result<()> {
    mount_all(mounts, root, Path::new("/nonexistent"), &no_program)
}

fn no_program(name: &str, _: Vec<std::ffi::OsString>) -> Result<()> {
    panic!("nothing has to run {name}")
}

fn table() -> Vec<mountinfo::Entry> {
    mountinfo::read().unwrap()
}

fn entry(point: &Path) -> mountinfo::Entry {
    table()
        .into_iter()
        .rev()
        .find(|e| e.point == point)
        .unwrap()
}

fn dirs(base: &Path, names: &[&str]) -> Vec<PathBuf> {
    names
        .iter()
        .map(|n| base.join(n))
        .inspect(|d| fs::create_dir_all(d).unwrap())
        .collect()
}

#[test]
fn read_only_bind_propagation_and_a_second_mount_inside() {
    private(|base| {
        let d = dirs(base, &["src/sub", "root", "other"]);
        let list = [
            wanted(
                "bind",
                &base.join("src"),
                "",
                &["rbind", "ro", "nosuid", "rshared"],
            ),
            wanted("tmpfs", Path::new("x"), "/sub", &["size=64k", "mode=700"]),
        ];
        mount_plainly(&list, &d[1]).unwrap();
        let root = entry(&d[1]);
        assert!(root.options.starts_with("ro,nosuid"), "{root:?}");
        assert!(fs::write(d[1].join("f"), "").is_err());
        assert!(entry(&d[1].join("sub")).super_options.contains("size=64k"));
    });
}

#[test]
fn a_failing_list_leaves_nothing_mounted() {
    private(|base| {
        let d = dirs(base, &["src/sub", "root"]);
        let before = table();
        let list = [
            wanted("bind", &base.join("src"), "", &["rbind", "ro"]),
            wanted("tmpfs", Path::new("x"), "sub", &[]),
            wanted("nosuchfs", Path::new("x"), "sub", &[]),
        ];
        let text = mount_plainly(&list, &d[1]).unwrap_err().to_string();
        assert!(text.starts_with("mount 3 of 3 (nosuchfs) on "), "{text}");
        assert_eq!(table(), before);
    });
}

#[test]
fn a_target_cannot_leave_its_root() {
    private(|base| {
        let d = dirs(base, &["root/in", "out"]);
        symlink(&d[1], d[0].parent().unwrap().join("link")).unwrap();
        for target in ["link", "../out", "in/../../out"] {
            let root = base.join("root");
            let done = mount_plainly(&[wanted("tmpfs", Path::new("x"), target, &[])], &root);
            assert!(done.is_err(), "{target}");
            assert!(!table().iter().any(|e| e.point == d[1]), "{target}");
        }
    });
}

#[test]
fn overlays_with_more_layers_than_a_page_holds() {
    private(|base| {
        let long = "layers/a-directory-name-that-is-long-enough-to-fill-the-page-soon";
        let names: Vec<String> = (0..80).map(|i| format!("{long}/{i}/fs")).collect();
        let layers: Vec<PathBuf> = names.iter().map(|n| base.join(n)).collect();
        for (i, layer) in layers.iter().enumerate() {
            fs::create_dir_all(layer).unwrap();
            fs::write(layer.join(format!("f{i}")), "").unwrap();
        }
        let d = dirs(base, &["upper", "work", "one", "two"]);
        let all: Vec<&str> = layers.iter().map(|l| l.to_str().unwrap()).collect();
        let options = [
            format!("workdir={}", d[1].display()),
            format!("upperdir={}", d[0].display()),
            format!("lowerdir={}", all.join(":")),
        ];
        let texts: Vec<&str> = options.iter().map(String::as_str).collect();
        let list = [wanted("overlay", Path::new("overlay"), "", &texts)];
        let cwd = std::env::current_dir().unwrap();
        mount_plainly(&list, &d[2]).unwrap();
        assert!(d[2].join("f0").exists() && d[2].join("f79").exists());
        umount2(&d[2], MntFlags::empty()).unwrap();

        // Which way it took: the new one, unless the kernel is older than it. Before 6.5 the new calls are there, but
        // overlay's options go through one page all the same.
        let parsed = Options::parse("overlay", &list[0].options).unwrap();
        if let Err(e) = overlay::by_layer("overlay", &d[2], &parsed) {
            let old = ["lowerdir+", "Cumulative options too large", "os error 38"];
            assert!(old.iter().any(|why| e.to_string().contains(why)), "{e}");
        }

        // The way of older kernels gives the same, without touching the process' directory.
        assert!(overlay::is_long("overlay", &parsed));
        let _ = umount2(&d[2], MntFlags::empty());
        overlay::relative("overlay", &d[3], &parsed).unwrap();
        assert!(d[3].join("f0").exists() && d[3].join("f79").exists());
        assert_eq!(std::env::current_dir().unwrap(), cwd);
    });
}

#[test]
fn the_tree_goes_stacked_nested_and_busy() {
    private(|base| {
        let d = dirs(base, &["tree", "beside"]);
        let x = Path::new("x");
        let list = [wanted("tmpfs", x, "", &[]), wanted("tmpfs", x, "", &[])];
        mount_plainly(&list, &d[0]).unwrap();
        dirs(&d[0], &["a b\\c/d"]);
        mount_plainly(&[wanted("tmpfs", x, "a b\\c/d", &[])], &d[0]).unwrap();
        mount_plainly(&[wanted("tmpfs", x, "", &[])], &d[1]).unwrap();
        let busy = File::create(d[0].join("a b\\c/d/f")).unwrap();
        symlink(&d[1], base.join("link")).unwrap();
        unmount_tree(&d[0]).unwrap();
        unmount_tree(&base.join("link")).unwrap();
        drop(busy);
        let left: Vec<_> = table()
            .into_iter()
            .map(|e| e.point)
            .filter(|p| p.starts_with(base))
            .collect();
        assert_eq!(left, [base.to_owned(), d[1].clone()]);
        // Again, and where nothing ever was.
        unmount_tree(&d[0]).unwrap();
        unmount_tree(&base.join("no/such/place")).unwrap();
        assert!(unmount_tree(Path::new("/")).is_err());
    });
}

#[test]
fn the_order_is_deepest_first_then_youngest() {
    let text =
        b"1 0 0:1 / /r rw - t t rw\n2 1 0:2 / /r/a rw - t t rw\n3 2 0:3 / /r/a rw - t t rw\n\
        4 1 0:4 / /r/b/c rw - t t rw\n5 0 0:5 / /rx rw - t t rw\n";
    let order = below(&mountinfo::parse(text), Path::new("/r"));
    assert_eq!(order, ["/r/b/c", "/r/a", "/r/a", "/r"].map(PathBuf::from));
}

/// The words with which a kernel refuses what it cannot do, that of a virtual machine for tests among them.
fn is_refusal(error: &Error, words: &[&str]) -> bool {
    let text = error.to_string();
    words.iter().any(|word| text.contains(word))
}

#[test]
fn an_id_mapped_bind_shows_other_owners_and_may_be_read_only() {
    private(|base| {
        let d = dirs(base, &["src", "root"]);
        fs::write(d[0].join("f"), "").unwrap();
        let maps = ["uidmap=0:1000:10,10:5000:1", "gidmap=0:2000:10"];
        let options = ["rbind", "ro", maps[0], maps[1]];
        let list = [wanted("bind", &d[0], "", &options)];
        match mount_plainly(&list, &d[1]) {
            Ok(()) => {
                let file = fs::metadata(d[1].join("f")).unwrap();
                assert_eq!((file.uid(), file.gid()), (1000, 2000));
                assert!(fs::write(d[1].join("g"), "").is_err(), "read-only");
            }
            // A tmpfs can be mapped since Linux 6.3.
            Err(e) => assert!(is_refusal(&e, &["cannot map the ids"]), "{e}"),
        }
    });
}

#[test]
fn the_lower_layers_of_an_overlay_are_mapped_and_the_upper_is_not() {
    private(|base| {
        let d = dirs(base, &["one", "t:wo", "upper", "work", "root", "scratch"]);
        fs::write(d[0].join("a"), "a").unwrap();
        fs::write(d[1].join("b"), "b").unwrap();
        let lower = format!("lowerdir={}:{}/t\\:wo", d[0].display(), base.display());
        let (upper, work) = (
            format!("upperdir={}", d[2].display()),
            format!("workdir={}", d[3].display()),
        );
        let options = [
            &work,
            &upper,
            &lower,
            "uidmap=0:1000:10",
            "gidmap=0:2000:10",
        ];
        let list = [wanted("overlay", Path::new("overlay"), "", &options)];
        let before = table();
        match mount_all(&list, &d[4], &d[5], &no_program) {
            Ok(()) => {
                for name in ["a", "b"] {
                    let file = fs::metadata(d[4].join(name)).unwrap();
                    assert_eq!((file.uid(), file.gid()), (1000, 2000), "{name}");
                }
                fs::write(d[4].join("new"), "").unwrap();
                assert_eq!(fs::metadata(d[2].join("new")).unwrap().uid(), 0);
                assert_eq!(table().len(), before.len() + 1, "{:?}", table());
            }
            Err(e) => {
                assert!(is_refusal(&e, &["cannot map the ids"]), "{e}");
                assert_eq!(table(), before);
            }
        }
        assert!(!d[5].join("layers").exists());
        let plain = [wanted(
            "tmpfs",
            Path::new("x"),
            "",
            &["uidmap=0:1:1", "gidmap=0:1:1"],
        )];
        let error = mount_all(&plain, &d[4], &d[5], &no_program).unwrap_err();
        assert_eq!(error.kind(), Kind::Unsupported);
    });
}

/// What a program is told, what it does, and what it answers.
fn by_program(
    base: &Path,
    kind: &str,
    mounts: bool,
    answer: impl Fn() -> Result<()>,
) -> (Result<()>, Vec<String>) {
    let told = std::cell::RefCell::new(Vec::new());
    let list = [
        wanted("tmpfs", Path::new("below"), "", &[]),
        wanted(
            kind,
            Path::new("src"),
            "",
            &["lowerdir=/l", "X-containerd.upperdir=/u", "ro"],
        ),
    ];
    let run = |program: &str, args: Vec<std::ffi::OsString>| {
        let args: Vec<_> = args.iter().map(|a| a.to_string_lossy()).collect();
        told.borrow_mut()
            .push(format!("{program} {}", args.join(" ")));
        if mounts {
            let kind = Some("tmpfs");
            mount(
                Some("made"),
                args[1].as_ref(),
                kind,
                MsFlags::empty(),
                None::<&str>,
            )
            .unwrap();
        }
        answer()
    };
    let done = mount_all(&list, &base.join("root"), Path::new("/nonexistent"), &run);
    (done, told.into_inner())
}

#[test]
fn a_program_mounts_filesystems_of_fuse_and_is_not_believed() {
    private(|base| {
        let root = &dirs(base, &["root"])[0];
        let before = table();
        let fails = || Err(Error::new(Kind::Other, "it printed this"));
        for kind in ["fuse.some-fs", "fuse3.some-fs"] {
            let program = format!("mount.{}", kind.strip_suffix(".some-fs").unwrap());
            let (done, told) = by_program(base, kind, true, || Ok(()));
            done.unwrap();
            let args = format!("src {} -o lowerdir=/l -o ro -t some-fs", root.display());
            assert_eq!(told, [format!("{program} {args}")]);
            assert_eq!(entry(root).source, Path::new("made"));
            unmount_tree(root).unwrap();
            assert_eq!(table(), before);
            let (done, _) = by_program(base, kind, false, || Ok(()));
            let text = done.unwrap_err().to_string();
            assert!(text.contains("it says that it has mounted"), "{text}");
            assert_eq!(table(), before);
            // What it made before it failed does not stay, and neither does what was below.
            let (done, _) = by_program(base, kind, true, fails);
            let text = done.unwrap_err().to_string();
            assert!(
                text.contains("mount 2 of 2") && text.contains("it printed this"),
                "{text}"
            );
            assert_eq!(table(), before);
        }
        assert!(helper::of("fuse").is_none() && helper::of("fuseblk").is_none());
    });
}
