//! What an attempt is told: prompts and payloads, on every store.

use crate::support::{World, on_each, stop};
use belfry::{AgentBuilder, AgentSpec, Error, RunRequest, RunState, ScheduleOptions, When};
use belfry_core::Reason;
use belfry_core::work::{Action, Work};
use belfry_store::{Expect, Store};
use serde_json::{Map, Value, json};

fn object(value: Value) -> Map<String, Value> {
    value.as_object().unwrap().clone()
}

/// An agent with one schedule that ticks every hour.
fn agent(agent_prompt: Option<&str>, prompt: Option<&str>, payload: Value) -> AgentSpec {
    let options = ScheduleOptions {
        prompt: prompt.map(str::to_owned),
        payload: object(payload),
        timezone: Some("Asia/Tokyo".into()),
        ..ScheduleOptions::default()
    };
    AgentBuilder::new("a")
        .schedule_with("s", When::Cron("0 * * * *".into()), options)
        .define(|agent| {
            agent.work.prompt = agent_prompt.map(str::to_owned);
            agent.work.payload = object(json!({"from": "agent", "kept": "agent"}));
        })
        .build()
}

async fn told(world: &World, spec: AgentSpec, request: RunRequest) -> (String, Value) {
    let engine = world.engine(&[spec]).await;
    engine.trigger("a/s", request).await.unwrap();
    engine.quiet().await;
    stop(&engine).await;
    let seen = world.starts("a/s").pop().unwrap();
    (seen.prompt, seen.payload)
}

#[tokio::test]
async fn a_prompt_is_the_runs_else_the_schedules_else_the_agents() {
    on_each(async |world: World| {
        let plain = RunRequest::default;
        let (prompt, payload) = told(&world, agent(None, None, json!({})), plain()).await;
        assert_eq!(prompt, "Execute your configured task.");
        assert_eq!(payload, json!({"from": "agent", "kept": "agent"}));

        let (prompt, payload) =
            told(&world, agent(Some("{{ payload.from }}"), None, json!({"from": "s"})), plain()).await;
        assert_eq!((prompt.as_str(), &payload), ("s", &json!({"from": "s", "kept": "agent"})));

        let both =
            || agent(Some("agent"), Some("{{ payload.from }} {{ payload.kept }}"), json!({"from": "s"}));
        assert_eq!(told(&world, both(), plain()).await.0, "s agent");
        let request = RunRequest { payload: object(json!({"from": "run"})), ..plain() };
        assert_eq!(told(&world, both(), request).await.0, "run agent");

        let hostile = format!("{{{{ {}1 }}}}", "-".repeat(6000));
        let request = RunRequest { prompt: Some(hostile.clone()), ..plain() };
        assert_eq!(told(&world, both(), request).await.0, hostile, "what comes with a run is data");
    })
    .await;
}

#[tokio::test]
async fn a_run_that_waits_gets_the_prompt_of_the_newest_definition() {
    on_each(async |world: World| {
        let asking = belfry::Engine::builder().store(world.store.clone()).clock(world.clock.clone()).build();
        asking.set_agents(vec![agent(None, Some("old {{ payload.n }}"), json!({"n": 1}))]).await.unwrap();
        let run = asking.trigger("a/s", RunRequest::default()).await.unwrap().run;
        let stored = asking.run(run).await.unwrap().unwrap();
        assert_eq!((stored.prompt, stored.payload), (None, json!({})), "no template is stored with a run");
        let new =
            "new {{ payload.n }} {{ last_success_at | default('never') }} {{ tick_at | default('by hand') }}";
        let engine = world.engine(&[agent(None, Some(new), json!({"n": 2}))]).await;
        engine.quiet().await;
        assert_eq!(world.starts("a/s")[0].prompt, "new 2 never by hand");
        engine.trigger("a/s", RunRequest::default()).await.unwrap();
        engine.quiet().await;
        assert_eq!(world.starts("a/s")[1].prompt, "new 2 2026-03-02T12:00:00Z by hand");
        stop(&engine).await;
    })
    .await;
}

#[tokio::test]
async fn a_run_that_waits_starts_although_its_schedule_became_invalid() {
    on_each(async |world: World| {
        let asking = belfry::Engine::builder().store(world.store.clone()).clock(world.clock.clone()).build();
        asking.set_agents(vec![agent(None, Some("x"), json!({}))]).await.unwrap();
        asking.trigger("a/s", RunRequest::default()).await.unwrap();
        let mut broken = agent(None, Some("still {{ payload.kept }}"), json!({}));
        broken.schedules[0].1.when = When::Cron("broken".into());
        let engine = world.engine(&[broken]).await;
        engine.quiet().await;
        assert_eq!(world.starts("a/s")[0].prompt, "still agent");
        stop(&engine).await;
    })
    .await;
}

#[tokio::test]
async fn a_stored_prompt_that_is_no_template_fails_its_runs_and_disturbs_no_other() {
    on_each(async |world: World| {
        let asking = belfry::Engine::builder().store(world.store.clone()).clock(world.clock.clone()).build();
        asking.set_agents(vec![agent(None, Some("x"), json!({}))]).await.unwrap();
        let run = asking.trigger("a/s", RunRequest::default()).await.unwrap().run;
        // As a store would hold it that was written by somebody else.
        let broken = [agent(Some("{{ nope }}"), Some("{{ nope }}"), json!({}))];
        world.store.apply(asking.now(), "engine", "", &broken).await.unwrap();
        let other = AgentBuilder::new("b").schedule("s", When::Every("1h".into())).build();
        asking.put_agent(&other, true, &Expect::Any).await.unwrap();
        let engine = world.engine_of(&["a", "b"]).await;
        engine.quiet().await;
        let ended = engine.run(run).await.unwrap().unwrap();
        assert_eq!((ended.state, ended.reason), (RunState::Failed, Some(Reason::Template)));
        let error = ended.error.unwrap();
        assert!(error.starts_with("the template `prompt`: unknown name `nope`"), "{error}");
        let status = engine.schedule_state("a/s").await.unwrap().status;
        assert!(format!("{status:?}").contains("unknown name `nope`"), "{status:?}");
        assert_eq!(world.starts("b/s").len(), 1);
        stop(&engine).await;
    })
    .await;
}

#[tokio::test]
async fn an_agent_with_a_wrong_template_is_refused() {
    let engine = belfry::Engine::builder().build();
    type Change = fn(&mut Work);
    let wrong: [(&str, Change); 5] = [
        ("prompt", |work| work.prompt = Some("{{ x }}".into())),
        ("run[1]", |work| work.action = Action::Run(vec!["echo".into(), "{{ payload".into()])),
        ("shell", |work| work.action = Action::Shell("echo {{ prompt }}".into())),
        ("commands.c.shell", |work| {
            work.commands.insert("c".into(), Action::Shell("echo {{ prompt }}".into()));
        }),
        ("env.A", |work| {
            work.env.insert("A".into(), "{% for x in payload %}".into());
        }),
    ];
    for (place, change) in wrong {
        let mut spec = agent(None, None, json!({}));
        change(&mut spec.definition.work);
        let told = [
            engine.set_agents(vec![spec.clone()]).await.err(),
            engine.put_agent(&spec, true, &Expect::Any).await.err(),
            engine.apply("file", "1", &[spec]).await.err(),
        ];
        for error in told {
            let Some(Error::Template { agent, source }) = error else { panic!("{place}: {error:?}") };
            assert_eq!((agent.as_str(), &*source.place), ("a", place));
        }
    }
}
