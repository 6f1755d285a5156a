package setup

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// The units as packages install them. A test holds them to deployment/systemd.
//
//go:embed tunnel-cloud.service
var cloudUnit string

//go:embed tunnel-edge.service
var edgeUnit string

// service is a program that systemd can run here.
type service struct {
	mode string // cloud or edge: what the program is called with
	unit string // as packages install it
	done string // what is true of this machine even if the unit cannot be installed
}

func cloudService() service { return service{"cloud", cloudUnit, "The cloud's files are there"} }
func edgeService() service  { return service{"edge", edgeUnit, "This machine has joined"} }

// name returns the name of the unit, without ".service".
func (s service) name() string { return "tunnel-" + s.mode }

// file returns the path to which --systemd writes the unit. Packages have units elsewhere (packageUnits).
func (s service) file() string { return "/etc/systemd/system/" + s.name() + ".service" }

// config returns the path of the configuration in a folder.
func (s service) config(dir string) string { return filepath.Join(dir, s.mode+".toml") }

// start returns the line of the unit that starts a program with the configuration of a folder.
func (s service) start(program, dir string) string {
	return "ExecStart=" + program + " " + s.mode + " -c " + s.config(dir) + "\n"
}

const (
	// packageProgram is the program in units of packages. newSystemdUnit replaces it by the path of the
	// running program, and DefaultDir by the folder of the files.
	packageProgram = "/usr/bin/tunnel"
	// installProgram is where an operator installs the program by hand.
	installProgram = "/usr/local/bin/tunnel"
	// booted is a folder that exists if systemd runs this machine (sd_booted(3)).
	booted = "/run/systemd/system"
)

// packageUnits returns the folders of the units of packages (systemd.unit(5)).
func packageUnits() []string { return []string{"/usr/lib/systemd/system", "/lib/systemd/system"} }

// systemdUnit is a unit for this machine.
type systemdUnit struct {
	service
	text      string
	systemctl string // path of the program
}

// newSystemdUnit checks that systemd runs this machine, and could run the service with files in dir, an
// absolute path. It writes nothing. Its errors are of type *stepError.
func newSystemdUnit(s service, dir string, h Host) (*systemdUnit, error) {
	program, err := os.Executable()
	if err == nil {
		program, err = filepath.EvalSymlinks(program)
	}
	if err != nil {
		return nil, err
	}
	systemctl, err := findSystemctl()
	failed := &stepError{step: "systemd", err: err}
	switch {
	case err != nil:
		failed.fix = fmt.Sprintf("Nothing was written or sent. Leave --systemd out, and have the program that starts "+
			"the services of this machine start: %stunnel %s -c %s", h.sudo(), s.mode, shellQuote(s.config(dir)))
	case os.Geteuid() != 0:
		failed.err = errors.New("only root may add a unit")
		failed.fix = "Run this with sudo. Nothing was written or sent."
	case hidden(program):
		failed.err = fmt.Errorf("the unit does not see %s: it has no home and no /tmp", program)
		failed.fix = "Install the program first: sudo install -m 755 " + shellQuote(program) + " " + installProgram
	case hidden(dir):
		failed.err = fmt.Errorf("the unit does not see %s: it has no home and no /tmp", dir)
		failed.fix = "Leave --dir out: the files go to " + DefaultDir + "."
	case !enterable(dir):
		failed.err = fmt.Errorf("the unit's user, which is not root, may not enter %s", dir)
		failed.fix = "chmod 755 " + shellQuote(dir) + ": what is secret in it has a mode of its own."
	case strings.ContainsAny(program+dir, " \t%\"'\\$"):
		failed.err = fmt.Errorf("a unit cannot name %s or %s as they are", program, dir)
		failed.fix = "Choose paths without blanks, quotes and % signs."
	default:
		text := strings.Replace(s.unit, s.start(packageProgram, DefaultDir), s.start(program, dir), 1)
		return &systemdUnit{s, text, systemctl}, nil
	}
	return nil, failed
}

// findSystemctl returns the path of systemctl, if systemd runs this machine. A container may have
// systemctl without systemd.
func findSystemctl() (string, error) {
	if _, err := os.Stat(booted); err != nil {
		return "", errors.New("systemd does not run this machine: there is no " + booted)
	}
	path, err := exec.LookPath("systemctl")
	if err != nil {
		return "", errors.New("there is no systemctl here")
	}
	return path, nil
}

// hidden reports whether the unit cannot see path, because of ProtectHome or PrivateTmp.
func hidden(path string) bool {
	for _, dir := range []string{"/home/", "/root/", "/run/user/", "/tmp/", "/var/tmp/"} {
		if strings.HasPrefix(path+"/", dir) {
			return true
		}
	}
	return false
}

// enterable reports whether every user may read and enter a folder. A missing folder counts, since
// makeDir makes it so.
func enterable(dir string) bool {
	info, err := os.Stat(dir)
	return errors.Is(err, fs.ErrNotExist) || err == nil && info.Mode().Perm()&0o005 == 0o005
}

// bindLowPorts lets the service listen on ports below 1024.
func (u *systemdUnit) bindLowPorts() {
	const none, one = "CapabilityBoundingSet=\n", "CapabilityBoundingSet=CAP_NET_BIND_SERVICE\n"
	u.text = strings.Replace(u.text, "\n"+none, "\n"+one+"AmbientCapabilities=CAP_NET_BIND_SERVICE\n", 1)
}

// install writes the unit, and has systemd start it now and at boot. A running service is restarted,
// since its files may have changed.
func (u *systemdUnit) install(ctx context.Context) error {
	if !packaged(u.file(), u.text, packageUnits()) {
		if err := overwrite(u.file(), newFile{mode: publicFile, content: []byte(u.text)}); err != nil {
			return &stepError{step: "systemd", err: err, fix: u.done + "; only the unit is missing."}
		}
	}
	for _, args := range [][]string{{"daemon-reload"}, {"enable", u.name()}, {"restart", u.name()}} {
		out, err := exec.CommandContext(ctx, u.systemctl, args...).CombinedOutput()
		if err != nil {
			return &stepError{
				step: "systemd",
				err:  fmt.Errorf("systemctl %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(string(out))),
				fix:  fmt.Sprintf("%s; systemctl cat %s shows the unit, and journalctl -u %[2]s says more.", u.done, u.name()),
			}
		}
	}
	return nil
}

// packaged reports whether a package has installed this very text as its unit, and no unit at file replaces
// it. Then a copy at file would only hide the units of later packages. folders are those of packages' units.
func packaged(file, text string, folders []string) bool {
	if _, err := os.Lstat(file); !errors.Is(err, fs.ErrNotExist) {
		return false
	}
	for _, dir := range folders {
		got, err := os.ReadFile(filepath.Join(dir, filepath.Base(file)))
		if err == nil {
			return string(got) == text
		}
	}
	return false
}

// running is what an operator reads about an installed unit.
func (u *systemdUnit) running() string {
	return fmt.Sprintf("%s runs now, and starts with the machine: journalctl -u %[1]s", u.name())
}
