//! A scheduler inside a program: `cargo run -p belfry --example embed`. It ends after three runs.

use belfry::event::Name;
use belfry::{AgentBuilder, Engine, StopOptions, When};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let engine = Engine::builder()
        .agents([AgentBuilder::new("greeter").schedule("hello", When::Every("1s".into())).build()])
        .handler("greeter", |run| async move {
            run.log(format!("hello from {} for {:?}", run.schedule(), run.tick_at())).await;
            Ok(())
        })
        .build();
    let mut events = engine.events();
    engine.start().await?;
    while engine.state().triggers < 3 || events.recv().await?.event != Name::RunFinished {}
    Ok(engine.stop(StopOptions::default()).await?)
}
