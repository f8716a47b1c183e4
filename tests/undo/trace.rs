//! In which order the steps of a creation that fails are undone, whichever step it is that fails.

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use podvisor::pod::plan::Request;
use podvisor::pod::record::Effect;
use tracing::field::{Field, Visit};
use tracing::subscriber::set_global_default;
use tracing::{Event, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};

use crate::kit::{Kit, POD, on_its_own, request};
use crate::mounts;
use crate::support::cgroup_mounts;
use crate::support::fake::Act;

/// Names of the steps that were undone, as the supervisor logs them.
#[derive(Clone, Default)]
pub struct Trace(Arc<Mutex<Vec<String>>>);

impl Trace {
    /// Of everything in this process from now on.
    pub fn of_this_process() -> Self {
        let trace = Self::default();
        set_global_default(tracing_subscriber::registry().with(trace.clone())).unwrap();
        trace
    }

    pub fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

#[derive(Default)]
struct Seen {
    undone: bool,
    step: String,
}

impl Visit for Seen {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        match field.name() {
            "message" => self.undone = format!("{value:?}") == "undone",
            "step" => self.step = format!("{value:?}").trim_matches('"').to_owned(),
            _ => {}
        }
    }
}

impl<S: Subscriber> Layer<S> for Trace {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut seen = Seen::default();
        event.record(&mut seen);
        if seen.undone {
            self.0.lock().unwrap().push(seen.step);
        }
    }
}

/// A pod whose kernel setting does not exist: its infra process is there, and is given up before it runs.
pub fn with_a_setting_that_is_none() -> Request {
    let mut wanted = request("fake");
    let linux = wanted
        .config
        .get_or_insert_default()
        .linux
        .mut_or_insert_default();
    linux
        .sysctls
        .insert("net.ipv4.no_such_setting".into(), "1".into());
    wanted
}

/// Item 22: whatever step fails, those before it are undone newest first, once each; what the request itself made (the
/// pod's files) goes last, with the pod, and with it the key.
#[test]
fn crio_22_a_creation_that_fails_at_any_step_is_undone_in_reverse_once() {
    on_its_own(
        "trace::crio_22_a_creation_that_fails_at_any_step_is_undone_in_reverse_once",
        async |kit: &Kit| {
            let trace = Trace::of_this_process();
            let pins = kit.config.runtime_root.join("netns");
            let one = cgroup_mounts().pop().unwrap();
            for (fails, undone) in [
                ("netns", &["netns"][..]),
                ("cni-add", &["cni-del", "netns"]),
                ("cgroup", &["cgroup", "cni-del", "netns"]),
                ("infra", &["infra", "cgroup", "cni-del", "netns"]),
                ("nothing", &[]),
            ] {
                kit.plugin.on("ADD", &[]);
                let mut wanted = request("fake");
                match fails {
                    "netns" => {
                        std::fs::create_dir_all(&kit.config.runtime_root).unwrap();
                        let _ = std::fs::remove_dir(&pins);
                        std::fs::write(&pins, "").unwrap();
                    }
                    "cni-add" => {
                        kit.plugin.on("ADD", &[Act::Exit(1)]);
                    }
                    "cgroup" => mounts::writable(&one, false),
                    "infra" => wanted = with_a_setting_that_is_none(),
                    _ => {}
                }
                let (adds, dels) = (kit.plugin.count("ADD"), kit.plugin.count("DEL"));
                let pod = kit.pod("default");
                pod.create(wanted).await.unwrap();
                let started = pod.start(POD, None).await;
                println!("{fails}: {started:?}");
                assert_eq!(started.is_ok(), fails == "nothing", "{fails}");
                match fails {
                    "netns" => std::fs::remove_file(&pins).unwrap(),
                    "cgroup" => mounts::writable(&one, true),
                    _ => {}
                }
                // The answer does not wait for the undo.
                kit.until(|| {
                    let e = pod.record().effects;
                    fails == "nothing"
                        || [e.netns, e.cni, e.cgroup, e.infra, e.pins] == [Effect::None; 5]
                })
                .await;
                tokio::time::sleep(Duration::from_millis(100)).await;
                assert_eq!(trace.take(), undone, "{fails}");
                pod.shutdown(POD).await.unwrap();
                let rest = match fails {
                    "nothing" => &["infra", "strays", "cgroup", "cni-del", "netns", "files"][..],
                    _ => &["files"],
                };
                assert_eq!(trace.take(), rest, "{fails}");
                assert!(!kit.state("default").exists(), "{fails}: the key is free");
                let added = kit.plugin.count("ADD") - adds;
                assert_eq!(kit.plugin.count("DEL") - dels, added, "{fails}");
            }
        },
    );
}
