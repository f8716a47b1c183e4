//! What containerd's own tests do with the OCI runtime (`runc-fp`): an init killed right after its create, an exec that
//! init's death overtakes. The program is chosen as theirs, and looks for the same things in the same places: `--log` among
//! the words before the verb, `config.json` and `init.pid` in its working directory, FIFOs in the exec's environment.

use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;

use nix::sys::stat::Mode;
use nix::unistd::mkfifo;

use super::*;

/// Takes its profile from the annotation, as containerd's does.
const RUNC_FP: &str = r#"#!/bin/sh
set -e
for word; do
  case $previous in
    --log) log=$word ;;
    --process) process=$word ;;
  esac
  case $word in create|exec) verb=${verb:-$word} ;; esac
  previous=$word
done
test -n "$log"
of() { sed -n "s/.*$1[=:\"]*\([^\"]*\)\".*/\1/p" "$2"; }
case $(of oci.runc.failpoint.profile config.json):$verb in
  issue9103:create)
    runc "$@"
    kill -9 "$(cat init.pid)"
    sleep 3
    ;;
  delayExec:exec)
    ready=$(of _RUNC_FP_DELAY_EXEC_READY "$process")
    delay=$(of _RUNC_FP_DELAY_EXEC_DELAY "$process")
    echo >"$ready"
    cat "$delay" >/dev/null
    exec runc "$@"
    ;;
  *) exec runc "$@" ;;
esac
"#;

/// Runs `body` with that runtime, and a container `c` of this profile.
fn profiled(name: &str, profile: &'static str, body: impl AsyncFnOnce(Kit, CreateRequest)) {
    sandboxed(name, || {
        if !require::tool("runc") {
            return;
        }
        fs::write("/run/runc-fp", RUNC_FP).unwrap();
        fs::set_permissions("/run/runc-fp", fs::Permissions::from_mode(0o755)).unwrap();
        supervise(async || {
            let kit = Kit::new("/run/runc-fp");
            let request = kit.request("c", "sleep 1000", |spec| {
                spec["annotations"] = json!({"oci.runc.failpoint.profile": profile});
            });
            body(kit, request).await;
        });
    });
}

#[test]
fn an_init_killed_after_its_create_is_a_stopped_task() {
    let name = "profiles::an_init_killed_after_its_create_is_a_stopped_task";
    profiled(name, "issue9103", async |kit, request| {
        let pid = kit.containers.create(request).await.unwrap();
        assert_eq!(kit.code("c", "").await, 137);
        let state = kit.containers.state("c", "").unwrap();
        assert_eq!((state.status, state.pid), (Status::Stopped, pid));
        let error = kit.containers.start("c", "").await.unwrap_err();
        assert_eq!(error.kind(), Kind::State, "{error}");
        kit.containers.delete("c", "").await.unwrap();
        assert_eq!(kit.log.take(), ["create", "exit c/c 137", "delete c 137"]);
        kit.assert_gone("c");
    });
}

#[test]
fn an_exec_that_inits_death_overtakes_stays_created() {
    let name = "profiles::an_exec_that_inits_death_overtakes_stays_created";
    profiled(name, "delayExec", async |kit, request| {
        kit.containers.create(request).await.unwrap();
        kit.containers.start("c", "").await.unwrap();
        let [mut ready, mut delay] = ["/run/ready", "/run/delay"].map(|path| {
            mkfifo(path, Mode::S_IRWXU).unwrap();
            let mut both = fs::OpenOptions::new();
            both.read(true).write(true);
            both.custom_flags(nix::libc::O_NONBLOCK).open(path).unwrap()
        });
        let env = [
            "PATH=/bin",
            "_RUNC_FP_DELAY_EXEC_READY=/run/ready",
            "_RUNC_FP_DELAY_EXEC_DELAY=/run/delay",
        ];
        let process =
            json!({"user": {"uid": 0, "gid": 0}, "args": ["/bin/true"], "env": env, "cwd": "/"});
        for id in ["e1", "e2"] {
            let process = process.to_string();
            let added = kit
                .containers
                .exec("c", id, false, "", "", "", process.as_bytes());
            added.await.unwrap();
        }
        let first = {
            let containers = kit.containers.clone();
            tokio::spawn(async move { containers.start("c", "e1").await })
        };
        while ready.read(&mut [0]).is_err() {
            sleep(Duration::from_millis(20)).await;
        }
        kit.containers.kill("c", "", 9, false).await.unwrap();
        while kit.book.get("c").unwrap().exit.is_none() {
            sleep(Duration::from_millis(5)).await;
        }
        // The first is still being started when the second comes.
        let second = timeout(BOUND, kit.containers.start("c", "e2")).await;
        let error = second.expect("at once").unwrap_err();
        assert!(
            error.to_string().contains("init process is not running"),
            "{error}"
        );
        assert_eq!(error.kind(), Kind::State, "{error}");
        delay.write_all(b"\n").unwrap();
        drop(delay);
        let error = timeout(BOUND, first).await.unwrap().unwrap().unwrap_err();
        assert!(error.to_string().contains("start exec"), "{error}");
        assert_eq!(kit.code("c", "").await, 137);
        let status = |exec: &str| kit.containers.state("c", exec).unwrap().status;
        assert_eq!(
            ["e1", "e2", ""].map(status),
            [Status::Created, Status::Created, Status::Stopped]
        );
        kit.containers.delete("c", "").await.unwrap();
        let events = kit.log.take();
        assert_eq!(
            events,
            [
                "create",
                "start",
                "exec-added",
                "exec-added",
                "exit c/c 137",
                "delete c 137"
            ]
        );
        kit.assert_gone("c");
    });
}
