//! Nodes of one store with different handlers.

use crate::support::{World, on_each, stop};
use belfry::{AgentBuilder, RunRequest, cron};
use belfry_core::RunState;
use belfry_store::Store;

#[tokio::test]
async fn only_a_node_with_the_handler_claims_its_runs() {
    let agents = || {
        let greeter = AgentBuilder::new("greeter").schedule("s", cron("0 0 1 1 *").unwrap());
        vec![greeter.define(|agent| agent.retry.max = 0).build()]
    };
    on_each(async |world: World| {
        // As `belfry up` does, which has no handlers.
        let without = world.engine_of(&[]).await;
        without.set_agents(agents()).await.unwrap();
        let run = without.trigger("greeter/s", RunRequest::default()).await.unwrap().run;
        without.quiet().await;
        let waiting = without.run(run).await.unwrap().unwrap();
        assert_eq!((waiting.state, waiting.attempt), (RunState::Pending, 0), "{waiting:?}");
        let why = belfry::testing::why(&world.store, "greeter/s", without.now()).await.unwrap();
        assert_eq!(why.reason.as_deref(), Some("no_node"), "{why:?}");
        assert!(
            why.words.contains("no node that is running has the Rust handler of greeter"),
            "{}",
            why.words
        );

        let with = world.engine_of(&["other", "greeter"]).await;
        with.quiet().await;
        assert_eq!(with.run(run).await.unwrap().unwrap().state, RunState::Completed);
        assert_eq!(world.starts("greeter/s").len(), 1);
        let nodes = world.store.nodes().await.unwrap();
        assert!(nodes.iter().any(|node| node.labels == ["handler:greeter", "handler:other"]), "{nodes:?}");

        // An agent that has become a program is for every node again.
        let mut agents = agents();
        agents[0].definition.work.action = belfry_core::work::Action::Run(vec!["true".into()]);
        without.set_agents(agents).await.unwrap();
        let known = world.store.agents().await.unwrap();
        assert!(known[0].definition.needs.is_empty(), "{known:?}");
        stop(&with).await;
        stop(&without).await;
    })
    .await;
}
