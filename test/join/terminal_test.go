package join

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/auth"
)

// TestTerminal: at a terminal the token is asked for, and is not shown; and when that is
// interrupted, the terminal shows again what is typed.
func TestTerminal(t *testing.T) {
	t.Parallel()
	token := auth.JoinToken{Address: "nobody.invalid:9000", ServerName: "nobody.invalid", Node: "edge1",
		Secret: auth.NewToken()}
	text := token.Encode().Reveal()
	for typed, want := range map[string]struct {
		code int
		says string
	}{
		text + "\n": {1, "FAIL  dns: "},
		"\x03":      {1, "interrupted"},
		"\n":        {2, "no token"},
	} {
		master, slave := openTerminal(t)
		cmd := exec.Command(filepath.Join(programs, "tunnel"), "join", "--dir", t.TempDir())
		cmd.Stdin, cmd.Stdout, cmd.Stderr = slave, slave, slave
		cmd.SysProcAttr = &unix.SysProcAttr{Setsid: true, Setctty: true}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		shown := new(testkit.Log)
		go io.Copy(shown, master) // until the terminal is closed
		testkit.Within(t, soon, "it asks, and hides what is typed", func() error {
			if !strings.Contains(shown.String(), "Token (it is not shown): ") || echoes(t, slave) {
				return errors.New("it does not")
			}
			return nil
		})
		fmt.Fprint(master, typed)
		cmd.Wait() // the exit code is what counts
		if code := cmd.ProcessState.ExitCode(); code != want.code {
			t.Errorf("exit code %d, want %d", code, want.code)
		}
		testkit.Within(t, soon, "it says what is wrong", func() error {
			if !strings.Contains(shown.String(), want.says) {
				return fmt.Errorf("it says %q", strings.ReplaceAll(shown.String(), text, "THE TOKEN"))
			}
			return nil
		})
		if !echoes(t, slave) {
			t.Error("the terminal does not show any more what is typed")
		}
		if strings.Contains(shown.String(), text) || strings.Contains(shown.String(), token.Secret.Reveal()) {
			t.Error("the terminal has shown the token")
		}
	}
}

func echoes(t *testing.T, terminal *os.File) bool {
	t.Helper()
	state, err := unix.IoctlGetTermios(int(terminal.Fd()), unix.TCGETS)
	if err != nil {
		t.Fatal(err)
	}
	return state.Lflag&unix.ECHO != 0
}

// openTerminal returns both ends of a terminal (pty(7)).
func openTerminal(t *testing.T) (master, slave *os.File) {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { master.Close() })
	number, err := unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN)
	err = errors.Join(err, unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0))
	if err != nil {
		t.Fatal(err)
	}
	if slave, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|unix.O_NOCTTY, 0); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { slave.Close() })
	return master, slave
}
