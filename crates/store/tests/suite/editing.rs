//! Sentences about schedules of the API, definitions and output.

use belfry_core::definition::{AnchorName, IfRunning, Options, When};
use belfry_core::{AgentDefinition, Reason, RunState, ScheduleDefinition};
use belfry_store::*;
use belfry_time::SignedDuration;

use super::world::*;

/// All of them, each on a store of its own.
pub async fn all<S: Store>(fresh: impl AsyncFn() -> S) {
    a_schedule_of_the_api_comes_changes_and_goes(&fresh().await).await;
    of_two_who_edit_what_they_read_one_changes_it(&fresh().await).await;
    files_and_the_api_leave_each_other_alone(&fresh().await).await;
    a_schedule_of_the_api_goes_with_its_agent(&fresh().await).await;
    a_removed_schedule_lets_run_what_runs(&fresh().await).await;
    an_agent_of_the_api_comes_changes_and_goes(&fresh().await).await;
    an_agent_of_a_file_is_not_touched_and_takes_over(&fresh().await).await;
    a_one_shot_goes_with_the_run_of_its_tick(&fresh().await).await;
    definitions_are_those_of_now(&fresh().await).await;
    output_is_kept_in_order_and_fenced(&fresh().await).await;
}

fn slot(interval: &str) -> ScheduleDefinition {
    schedule(
        When::Every(interval.into()),
        Options { anchor: AnchorName::Slot, max_pending: 3, ..Options::default() },
    )
}

async fn a_schedule_of_the_api_comes_changes_and_goes(store: &impl Store) {
    let mut world = World::new(store);
    world.apply(&[agent("a", unlimited(), &[])]).await;
    let put = async |now, definition: &_| {
        store.put_schedule(now, "a", "s", definition, &Expect::Any).await.unwrap()
    };
    assert_eq!(
        store.put_schedule(world.now, "b", "s", &slot("1m"), &Expect::Any).await.unwrap(),
        Put::NoAgent,
        "nobody to run it"
    );
    let Put::Added(id) = put(world.now, &slot("1m")).await else { panic!("it is new") };
    assert_eq!(put(world.now, &slot("1m")).await, Put::Unchanged(id));
    world.plan_all().await;
    let record = world.schedule("a/s").await;
    assert_eq!((record.id, record.source.as_str(), record.revision), (id, API, 1));
    let next = record.token.unwrap();
    // An edit that keeps the timing moves nothing.
    let mut other = slot("1m");
    other.options.max_pending = 5;
    assert_eq!(put(world.now, &other).await, Put::Changed(id));
    let record = world.schedule("a/s").await;
    assert_eq!((record.revision, record.token), (1, Some(next)));
    // One that changes it fires nothing before it and nothing again.
    world.advance(60_000);
    assert_eq!(world.plan_all().await, 1);
    assert_eq!(put(world.now, &slot("20s")).await, Put::Changed(id));
    assert_eq!(world.plan_all().await, 0);
    let record = world.schedule("a/s").await;
    assert_eq!(
        (record.revision, record.token.unwrap().tick_at),
        (2, world.now + SignedDuration::from_secs(20))
    );
    let run = store.live_runs().await.unwrap()[0].id;
    assert_eq!(
        store.remove_schedule(world.now, id, &Expect::Any).await.unwrap(),
        Removed::Gone { ended: vec![run] }
    );
    assert_eq!(store.remove_schedule(world.now, id, &Expect::Any).await.unwrap(), Removed::NotFound);
    let ended = store.run(run).await.unwrap().unwrap();
    assert_eq!((ended.state, ended.reason), (RunState::Cancelled, Some(Reason::ScheduleRemoved)));
    assert!(store.schedule("a/s").await.unwrap().is_none());
    assert_eq!(store.ended_runs(id, 10).await.unwrap().len(), 1, "history stays");
    assert_eq!(store.next_due().await.unwrap(), None);
    let Put::Added(again) = put(world.now, &slot("1m")).await else { panic!("it comes back new") };
    assert!(again != id && world.schedule("a/s").await.last.is_none());
    world.assert_whole().await;
}

async fn of_two_who_edit_what_they_read_one_changes_it(store: &impl Store) {
    let world = World::new(store);
    world.apply(&[agent("a", unlimited(), &[("file", every("5m"))])]).await;
    let put = async |definition: &_, expect: &Expect| {
        store.put_schedule(world.now, "a", "s", definition, expect).await.unwrap()
    };
    let gone = Expect::Same { revision: 1, definition: Box::new(slot("1m")) };
    assert_eq!(put(&slot("1m"), &gone).await, Put::Differs, "there is none");
    let Put::Added(id) = put(&slot("1m"), &Expect::Absent).await else { panic!("it is new") };
    assert_eq!(put(&slot("2m"), &Expect::Absent).await, Put::Differs, "there is one");
    // Both change what they have read: another key, or the timing and back, which is another revision.
    let seen = Expect::same(&world.schedule("a/s").await);
    let mut other = slot("1m");
    other.options.max_pending = 5;
    assert_eq!(put(&other, &seen).await, Put::Changed(id));
    assert_eq!(put(&slot("2m"), &seen).await, Put::Differs);
    assert_eq!(world.schedule("a/s").await.definition, other);
    assert_eq!(put(&slot("2m"), &Expect::Any).await, Put::Changed(id));
    assert_eq!(put(&other, &Expect::Any).await, Put::Changed(id));
    let stale = Expect::Same { revision: 1, definition: Box::new(other.clone()) };
    assert_eq!(put(&slot("3m"), &stale).await, Put::Differs);
    let remove = async |id, expect: &Expect| store.remove_schedule(world.now, id, expect).await.unwrap();
    assert_eq!(remove(id, &stale).await, Removed::Differs);
    let seen = Expect::same(&world.schedule("a/s").await);
    assert_eq!(put(&other, &seen).await, Put::Unchanged(id));
    assert_eq!(remove(id, &seen).await, Removed::Gone { ended: vec![] });
    assert_eq!(put(&other, &seen).await, Put::Differs, "it does not come back by an edit");
    // Whose it is comes before what it is.
    let file = world.schedule("a/file").await.id;
    assert_eq!(remove(file, &stale).await, Removed::OwnedBy("files".into()));
    let owned = store.put_schedule(world.now, "a", "file", &other, &stale).await.unwrap();
    assert_eq!(owned, Put::OwnedBy("files".into()));
    world.assert_whole().await;
}

async fn files_and_the_api_leave_each_other_alone(store: &impl Store) {
    let world = World::new(store);
    let fleet = [agent("a", unlimited(), &[("file", every("5m"))])];
    world.apply(&fleet).await;
    let owned = world.schedule("a/file").await.id;
    let put = store.put_schedule(world.now, "a", "file", &every("1m"), &Expect::Any).await.unwrap();
    assert_eq!(put, Put::OwnedBy("files".into()));
    assert_eq!(
        store.remove_schedule(world.now, owned, &Expect::Any).await.unwrap(),
        Removed::OwnedBy("files".into())
    );
    assert_eq!(world.schedule("a/file").await.definition, every("5m"));
    store.put_schedule(world.now, "a", "api", &every("1m"), &Expect::Any).await.unwrap();
    // A reload touches only what files own.
    assert_eq!(world.apply(&fleet).await, Applied::default());
    let both = [agent("a", unlimited(), &[("file", every("5m")), ("api", every("9m"))])];
    assert_eq!(world.apply(&both).await, Applied { foreign: 1, ..Applied::default() });
    let record = world.schedule("a/api").await;
    assert_eq!((record.definition, record.source.as_str()), (every("1m"), API));
    let limited = AgentDefinition { max_concurrent: Some(7), ..unlimited() };
    let applied = world.apply(&[agent("a", limited, &[("file", every("5m"))])]).await;
    assert_eq!(applied, Applied { agents: 1, ..Applied::default() }, "a key of the agent alone");
    let applied = world.apply(&[agent("a", unlimited(), &[])]).await;
    assert_eq!(applied, Applied { retired: 1, agents: 1, ..Applied::default() });
    assert_eq!(world.schedule("a/api").await.id, record.id);
    // Sets of files take over from each other.
    world.apply(&fleet).await;
    store.apply(world.now, "others", "digest", &fleet).await.unwrap();
    assert_eq!(world.schedule("a/file").await.source, "others");
    world.assert_whole().await;
}

async fn a_schedule_of_the_api_goes_with_its_agent(store: &impl Store) {
    let mut world = World::new(store);
    world.apply(&[agent("a", unlimited(), &[("file", every("5m"))])]).await;
    store.put_schedule(world.now, "a", "api", &every("1m"), &Expect::Any).await.unwrap();
    assert_eq!(world.plan_all().await, 2);
    let applied = world.apply(&[]).await;
    assert_eq!((applied.retired, applied.ended.len()), (2, 2));
    assert_eq!(store.next_due().await.unwrap(), None);
    assert_eq!(
        store.put_schedule(world.now, "a", "api", &every("1m"), &Expect::Any).await.unwrap(),
        Put::NoAgent,
        "and does not come back without it"
    );
    world.assert_whole().await;
}

async fn a_removed_schedule_lets_run_what_runs(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    world.apply(&[agent("a", AgentDefinition::default(), &[])]).await;
    let Put::Added(id) = store.put_schedule(world.now, "a", "s", &every("5m"), &Expect::Any).await.unwrap()
    else {
        panic!("it is new")
    };
    world.plan_all().await;
    let running = world.claim(node, 5).await.remove(0);
    let (waiting, _) = world.enqueue("a/s", None).await;
    assert_eq!(
        store.remove_schedule(world.now, id, &Expect::Any).await.unwrap(),
        Removed::Gone { ended: vec![waiting] }
    );
    world.advance(60_000);
    assert_eq!(world.complete(&running).await, Finished::Ended(RunState::Completed));
    assert_eq!(store.next_due().await.unwrap(), None, "the end of its run does not arm it");
    assert_eq!(store.ended_runs(id, 10).await.unwrap().len(), 2);
    world.assert_whole().await;
}

async fn a_one_shot_goes_with_the_run_of_its_tick(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    let once = schedule(
        When::After("1m".into()),
        Options { delete_after_run: true, if_running: IfRunning::Allow, ..Options::default() },
    );
    let stays = ScheduleDefinition::new(When::After("1m".into()));
    let fleet = [agent("a", unlimited(), &[("goes", once.clone()), ("stays", stays)])];
    world.apply(&fleet).await;
    world.plan_all().await;
    world.enqueue("a/goes", None).await;
    let by_hand = world.claim(node, 5).await.remove(0);
    world.advance(60_000);
    assert_eq!(world.plan_all().await, 2);
    let ticks = world.claim(node, 5).await;
    // It has fired, but the run of its tick has not ended.
    world.complete(&by_hand).await;
    let id = world.schedule("a/goes").await.id;
    for claimed in &ticks {
        world.complete(claimed).await;
    }
    assert!(store.schedule("a/goes").await.unwrap().is_none());
    assert_eq!(store.spent("files").await.unwrap(), [("a/goes".to_owned(), once)].into());
    assert!(store.spent("others").await.unwrap().is_empty());
    assert_eq!(world.apply(&fleet).await, Applied::default());
    assert_eq!(store.ended_runs(id, 10).await.unwrap().len(), 2, "never its runs");
    assert_eq!(world.schedule("a/stays").await.status, belfry_core::check::Status::Exhausted);
    world.assert_whole().await;
}

async fn definitions_are_those_of_now(store: &impl Store) {
    let mut world = World::new(store);
    let fleet = |max, interval: &str| {
        let definition = AgentDefinition { max_concurrent: max, ..AgentDefinition::default() };
        let bad = schedule(
            When::Cron("0 9 * * *".into()),
            Options { timezone: Some("Mars/Phobos".into()), ..Options::default() },
        );
        [agent("a", definition, &[("s", every(interval)), ("bad", bad)])]
    };
    world.apply(&fleet(Some(1), "5m")).await;
    world.plan_all().await;
    let (id, bad) = (world.schedule("a/s").await.id, world.schedule("a/bad").await.id);
    let mut answer = store.definitions(&[bad, -1, id]).await.unwrap();
    assert_eq!(answer.len(), 3, "as many as were asked for, in order");
    let first = answer.pop().unwrap().unwrap();
    assert!(answer[1].is_none(), "there is no such schedule");
    assert!(answer[0].as_ref().unwrap().compiled.is_err());
    assert_eq!((first.schedule, &*first.name, &*first.agent_name), (id, "a/s", "a"));
    assert_eq!(first.agent_definition.max_concurrent, Some(1));
    assert_eq!(first.origin, Some(start()));
    assert_eq!(first.waits_for, Some(store.live_runs().await.unwrap()[0].id));
    world.apply(&fleet(Some(2), "10m")).await;
    let second = store.definitions(&[id]).await.unwrap().remove(0).unwrap();
    assert_ne!(second.agent_revision, first.agent_revision);
    assert_eq!(second.agent_definition.max_concurrent, Some(2));
    assert_eq!(*second.compiled.unwrap().definition, every("10m"));
    assert_eq!((second.origin, second.waits_for), (None, None), "a new revision starts anew");
    world.apply(&fleet(Some(2), "10m")).await;
    let third = store.definitions(&[id]).await.unwrap().remove(0).unwrap();
    assert_eq!(third.agent_revision, second.agent_revision);
    world.apply(&[]).await;
    assert!(store.definitions(&[id]).await.unwrap()[0].is_some(), "also of one that is gone");
    assert!(store.definitions(&[]).await.unwrap().is_empty());
}

async fn output_is_kept_in_order_and_fenced(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    world.apply(&[agent("a", AgentDefinition::default(), &[("s", every("1h"))])]).await;
    world.plan_all().await;
    let first = world.claim(node, 1).await.remove(0);
    let chunk = |claimed: &Claimed, n: u64, stream, text: &str| OutputChunk {
        seq: OutputChunk::first_seq(claimed.epoch) + n,
        attempt: claimed.attempt,
        stream,
        bytes: text.into(),
    };
    let written = [
        chunk(&first, 0, Stream::Out, "one"),
        chunk(&first, 1, Stream::Err, "\u{0}two"),
        chunk(&first, 2, Stream::Note, ""),
    ];
    assert!(store.append_output(first.run, first.epoch, &written[..2]).await.unwrap());
    assert!(store.append_output(first.run, first.epoch, &written).await.unwrap(), "a repeat is harmless");
    assert_eq!(store.output(first.run, None, 1000).await.unwrap(), written);
    assert_eq!(store.output(first.run, None, 1).await.unwrap(), written[..1]);
    assert_eq!(store.output(first.run, None, 4).await.unwrap(), written[..2]);
    assert_eq!(store.output(first.run, Some(written[0].seq), 1000).await.unwrap(), written[1..]);
    world.fail(&first).await;
    let late = [chunk(&first, 3, Stream::Out, "late")];
    assert!(!store.append_output(first.run, first.epoch, &late).await.unwrap(), "the claim is gone");
    world.advance(10_000);
    let second = world.claim(node, 1).await.remove(0);
    assert!(!store.append_output(first.run, first.epoch, &late).await.unwrap());
    let more = [chunk(&second, 0, Stream::Out, "again")];
    assert!(store.append_output(second.run, second.epoch, &more).await.unwrap());
    world.complete(&second).await;
    assert!(!store.append_output(second.run, second.epoch, &more).await.unwrap(), "it has ended");
    let all = store.output(first.run, None, 1000).await.unwrap();
    assert_eq!(all, [&written[..], &more[..]].concat(), "both attempts, in order");
    let unknown = world.run_id();
    assert!(store.output(unknown, None, 1000).await.unwrap().is_empty());
    assert!(!store.append_output(unknown, 1, &more).await.unwrap());
}

async fn an_agent_of_the_api_comes_changes_and_goes(store: &impl Store) {
    let mut world = World::new(store);
    let node = world.join(1).await;
    let one = AgentDefinition { max_concurrent: Some(1), ..unlimited() };
    let made = agent("a", one.clone(), &[("s", every("1h")), ("t", every("1h"))]);
    assert_eq!(store.put_agent(world.now, &made, true, &Expect::Any).await.unwrap(), PutAgent::Added);
    assert_eq!(store.put_agent(world.now, &made, true, &Expect::Any).await.unwrap(), PutAgent::Unchanged);
    let known = store.agents().await.unwrap();
    assert_eq!((known[0].name.as_str(), known[0].source.as_str()), ("a", API));
    assert_eq!(world.schedule("a/t").await.source, API);
    assert_eq!(world.plan_all().await, 2);
    let running = world.claim(node, 5).await.remove(0);

    // A limit that is raised lets through what waits; schedules that are not named stay, unless it is whole.
    let wide = agent("a", AgentDefinition { max_concurrent: Some(2), ..one.clone() }, &[("s", every("2h"))]);
    assert_eq!(
        store.put_agent(world.now, &wide, false, &Expect::Any).await.unwrap(),
        PutAgent::Changed { ended: vec![] }
    );
    assert_ne!(store.agents().await.unwrap()[0].revision, known[0].revision);
    assert!(store.schedule("a/t").await.unwrap().is_some());
    let second = world.claim(node, 5).await.remove(0);
    assert_eq!(world.schedule("a/s").await.definition, every("2h"));
    world.complete(&second).await;
    let name = store.run(running.run).await.unwrap().unwrap().name;
    let (gone, rest) = match name.as_str() {
        "a/t" => ("a/t", ("s", every("2h"))),
        _ => ("a/s", ("t", every("1h"))),
    };
    let less = agent("a", wide.definition.clone(), std::slice::from_ref(&rest));
    assert_eq!(
        store.put_agent(world.now, &less, true, &Expect::Any).await.unwrap(),
        PutAgent::Changed { ended: vec![] }
    );
    assert!(store.schedule(gone).await.unwrap().is_none());
    assert_eq!(store.put_agent(world.now, &less, true, &Expect::Any).await.unwrap(), PutAgent::Unchanged);

    let (waiting, _) = world.enqueue(&format!("a/{}", rest.0), None).await;
    // Two who decide on what they have read: one of them is late.
    let known = store.agents().await.unwrap().into_iter().find(|known| known.name == "a").unwrap();
    let expect = Expect::same_agent(&known);
    let late = agent("a", AgentDefinition { max_concurrent: Some(7), ..AgentDefinition::default() }, &[]);
    assert_eq!(store.put_agent(world.now, &late, false, &Expect::Absent).await.unwrap(), PutAgent::Differs);
    assert_eq!(
        store.put_agent(world.now, &late, false, &expect).await.unwrap(),
        PutAgent::Changed { ended: vec![] }
    );
    assert_eq!(store.put_agent(world.now, &late, false, &expect).await.unwrap(), PutAgent::Differs);
    assert_eq!(store.remove_agent(world.now, "a", &expect).await.unwrap(), Removed::Differs);
    assert_eq!(
        store.remove_agent(world.now, "a", &Expect::Any).await.unwrap(),
        Removed::Gone { ended: vec![waiting] }
    );
    assert_eq!(store.remove_agent(world.now, "a", &Expect::Any).await.unwrap(), Removed::NotFound);
    assert!(store.agents().await.unwrap().is_empty());
    let ended = store.run(waiting).await.unwrap().unwrap();
    assert_eq!((ended.state, ended.reason), (RunState::Cancelled, Some(Reason::AgentRemoved)));
    assert_eq!(world.complete(&running).await, Finished::Ended(RunState::Completed), "what runs goes on");
    assert_eq!(store.run(running.run).await.unwrap().unwrap().name, gone, "history stays");
    assert_eq!(
        store.put_agent(world.now, &made, true, &Expect::Any).await.unwrap(),
        PutAgent::Added,
        "another of that name"
    );
    world.assert_whole().await;
}

async fn an_agent_of_a_file_is_not_touched_and_takes_over(store: &impl Store) {
    let world = World::new(store);
    let filed = agent("filed", unlimited(), &[("s", every("1h"))]);
    world.apply(std::slice::from_ref(&filed)).await;
    let other = agent("filed", AgentDefinition::default(), &[("more", every("1h"))]);
    let source = world.schedule("filed/s").await.source;
    let owned = store.put_agent(world.now, &other, true, &Expect::Any).await.unwrap();
    assert_eq!(owned, PutAgent::OwnedBy(source.clone()));
    assert_eq!(
        store.remove_agent(world.now, "filed", &Expect::Any).await.unwrap(),
        Removed::OwnedBy(source.clone())
    );
    assert!(store.schedule("filed/more").await.unwrap().is_none(), "nothing of it");
    let made = agent("made", unlimited(), &[("mine", every("1h"))]);
    assert_eq!(store.put_agent(world.now, &made, true, &Expect::Any).await.unwrap(), PutAgent::Added);
    world.apply(std::slice::from_ref(&filed)).await;
    assert!(store.schedule("made/mine").await.unwrap().is_some(), "files leave the API's agents alone");
    let taken = agent("made", unlimited(), &[("theirs", every("1h"))]);
    world.apply(&[filed, taken]).await;
    let known = store.agents().await.unwrap();
    assert!(known.iter().all(|agent| agent.source == source), "but one that they name is theirs");
    assert_eq!(world.schedule("made/mine").await.source, API);
    assert_eq!(
        store.put_agent(world.now, &made, true, &Expect::Any).await.unwrap(),
        PutAgent::OwnedBy(source)
    );
}
