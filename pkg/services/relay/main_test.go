package relay

import (
	"os"
	"testing"

	"tunnel.example/tunnel/internal/testkit/leaks"
)

func TestMain(m *testing.M) {
	if text := os.Getenv(bareRelay); text != "" {
		runBareRelay(text)
		return
	}
	leaks.Main(m)
}
